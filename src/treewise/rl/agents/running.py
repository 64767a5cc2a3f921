"""Runs an agent on tasks: an episode and its key, processes of its own, and a reward, or why there is none."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from treewise.base.addresses import LOOPBACK
from treewise.data.io.field_checks import printable
from treewise.errors import ConfigError, SamplerError, TaskError
from treewise.rl.agents import host
from treewise.rl.agents.episodes import AT_IMPORT, Episode, Episodes
from treewise.rl.agents.host import is_function
from treewise.rl.agents.wire.protocol import environment
from treewise.rl.tasks.calls import FailedCall
from treewise.rl.tasks.reward_functions import number

FailureKind = Literal["raised", "exited", "timeout", "flooded", "silent", "no reward", "stopped"]
START_SECONDS = 120.0  # for the user's module
# Runs a file of ours in another Python, without its folder among those that modules are looked for in.
RUN_FILE = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
MAX_VARIABLE = 100_000  # characters of a task in an environment variable; the system allows 128 KiB
WHY = {
    "timeout": "it did not end within {seconds:g} seconds (episode_seconds)",
    "flooded": "it made more than {calls} calls (max_calls)",
    "stopped": "it was stopped",
}


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """What came of an episode. reward: None where it failed, or where reward functions decide. failure: why it failed.
    output: the end of what the agent printed. num_bytes: all that it printed."""

    reward: float | None
    kind: FailureKind | None = None
    failure: str | None = None
    output: str = ""
    num_bytes: int = 0


class AgentRunner:
    """One agent.

    Parameters:
        agent: `file.py:function`, `module:function` (`async def run(task, client)`, a plain function, or one that takes
            the task alone), or a command.
        url: of the endpoint.
        episodes: of the endpoint.
        seconds: of an episode.
        needs_reward: whether an episode without a reward has failed; not where reward functions decide.
        python: that runs a function, with the packages that it imports; None: this one.

    Raises:
        ConfigError: the agent cannot be loaded: with file and line of the error.
    """

    def __init__(
        self,
        agent: str,
        url: str,
        episodes: Episodes,
        *,
        seconds: float = 600.0,
        needs_reward: bool = True,
        python: str | None = None,
    ) -> None:
        if python is not None and not is_function(agent):
            raise ConfigError(f"agent_settings.python is given with the command {agent!r}; let it name its own Python.")
        self.agent, self.url, self.episodes, self.seconds = agent, url, episodes, seconds
        self.needs_reward = needs_reward
        self.failures: Counter[str] = Counter()
        self._ends: dict[str, Future[dict[str, Any]]] = {}
        self._names: dict[str, str] = {}  # of the processes of an episode, by its key
        self._flooded: set[str] = set()
        self._stopping: set[str] = set()  # keys
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="treewise-agents-")
        self._number = 0
        self._is_closing = False
        self._link, other = socket.socketpair()
        words = [python or sys.executable, "-c", RUN_FILE, host.__file__, str(other.fileno()), agent]
        words.append(self._folder.name)
        try:
            self._process = subprocess.Popen(
                words,
                env={**os.environ, **self._addresses(episodes.import_key)},  # of no episode: nothing else may be called
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._link.close()
            self._folder.cleanup()
            what = f"{python}: {error.strerror}; name a Python 3.10 or later"
            raise ConfigError(f"agent_settings.python: {what}.") from None
        finally:
            other.close()
        self._lines = self._link.makefile("rb")
        self._reader: threading.Thread | None = None
        self._link.settimeout(START_SECONDS)
        try:
            first = json.loads(self._lines.readline() or b'{"error": "its process ends at once"}')
        except (TimeoutError, ValueError):
            first = {"error": f"it does not load within {START_SECONDS:g} seconds"}
        self._link.settimeout(None)
        if "error" in first:
            self.close()
            raise ConfigError(_why_not_loaded(agent, first))
        episodes.import_calls = 0  # what the module could do without
        self._reader = threading.Thread(target=self._read, daemon=True, name="treewise-agents")
        self._reader.start()

    def run(self, episode: Episode, task: Mapping[str, Any]) -> AgentOutcome:
        """Runs it to its end; the episode is closed then.

        Raises:
            ConfigError: a client was made before any episode began. SamplerError: the sampler failed, which is no fault
                of the agent. TaskError: the agents' process is gone,
                which says nothing of the episode.
        """
        with self._lock:
            self._number += 1
            name = str(self._number)
            end = self._ends[name] = Future()
            self._names[episode.key] = name
        folder = Path(self._folder.name) / name
        folder.mkdir()
        reward_file, task_file = folder / "reward", folder / "task.json"
        text = json.dumps(task, ensure_ascii=False, default=str)
        task_file.write_text(text)
        environment = self._environment(episode, text, task_file, reward_file)
        episode.on_flood = lambda: self._stop(name, flooded=True)
        asked = {"id": name, "task": json.loads(text), "environment": environment, "seconds": self.seconds}
        self._send({**asked, "seed": episode.seed})
        if episode.key in self._stopping:
            self._stop(name, flooded=False)
        try:
            found = end.result()
        finally:
            del self._names[episode.key]
            self._stopping.discard(episode.key)
            self.episodes.end(episode)
        if self.episodes.import_calls:
            raise ConfigError(
                f"agent {self.agent!r} called the model with an address or a key from before the episode. {AT_IMPORT}"
            )
        if isinstance(episode.failure, BaseException):
            raise (
                episode.failure
                if isinstance(episode.failure, SamplerError)
                else SamplerError(
                    f"{episode.name}: the sampler fails: {type(episode.failure).__name__}: {episode.failure}"
                )
            ) from episode.failure
        outcome = self._outcome(name, episode, found, reward_file)
        if outcome.kind is not None:
            self.failures[outcome.kind] += 1
        return outcome

    def stop(self, episode: Episode) -> None:
        """Ends the agent of an episode, now or as soon as it begins; its `run` then returns."""
        self._stopping.add(episode.key)
        if (name := self._names.get(episode.key)) is not None:
            with suppress(TaskError):  # all are gone
                self._stop(name, flooded=False)

    def close(self) -> None:
        """Ends all agents."""
        self._is_closing = True
        with suppress(OSError):  # it is closed already, or the other side is
            self._link.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join()
        self._lines.close()
        self._link.close()
        for end in self._ends.values():
            if not end.done():
                end.set_result({"ended": "stopped"})
        self._folder.cleanup()

    # -- how ----------------------------------------------------------------------------------------------------------

    def _addresses(self, key: str) -> dict[str, str]:
        """Where the usual SDKs find the endpoint, and with which key; no proxy is asked for it."""
        known, own = os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), urlsplit(self.url).hostname
        hosts = ",".join(dict.fromkeys(filter(None, [known, *LOOPBACK, own])))
        return {
            **environment(self.url, key),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), hosts),
        }

    def _environment(self, episode: Episode, text: str, task_file: Path, reward_file: Path) -> dict[str, str]:
        files = {"TREEWISE_TASK_FILE": str(task_file), "TREEWISE_REWARD_FILE": str(reward_file)}
        task = {"TREEWISE_TASK": text} if len(text) < MAX_VARIABLE else {}
        return {**self._addresses(episode.key), **files, **task}

    def _outcome(self, name: str, episode: Episode, found: Mapping[str, Any], reward_file: Path) -> AgentOutcome:
        output = f"{found.get('stdout', '')}{found.get('stderr', '')}"
        rest: dict[str, Any] = {"output": output, "num_bytes": int(found.get("bytes", 0))}

        def failed(kind: FailureKind, why: str) -> AgentOutcome:
            last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
            shown = f" Its last line: {printable(last)[:300]}" if last and kind != "raised" else ""
            return AgentOutcome(None, kind, f"{episode.name}: {why}.{shown}", **rest)

        why = found.get("ended")
        if why is not None:
            kind: FailureKind = "flooded" if name in self._flooded else "timeout" if why == "timeout" else "stopped"
            return failed(kind, WHY[kind].format(seconds=self.seconds, calls=self.episodes.settings.max_calls))
        result = json.loads(found["result"]) if found.get("result") else {}
        if "error" in result:
            return failed("raised", printable(result["error"]))
        code = found["code"]
        is_python = is_function(self.agent)
        if code or (is_python and not result):
            by = f"signal {code - 128} ended it" if code > 128 else f"it exited with code {code}"
            return failed("exited", by + (" before it returned" if is_python else ""))
        if not episode.recording.calls and not episode.num_passed_on:
            return failed("silent", "it made no call to the endpoint, whose address is in OPENAI_BASE_URL")
        if (of_call := next((why for key, why in episode.no_rewards.items() if key is not None), None)) is not None:
            return failed("no reward", of_call)
        reward, problem = _reward_of(episode, result, reward_file, str(found.get("stdout", "")), is_python=is_python)
        if reward is None and self.needs_reward:
            return failed("no reward", problem)
        return AgentOutcome(reward, **rest)

    def _stop(self, name: str, *, flooded: bool) -> None:
        if flooded:
            self._flooded.add(name)
        self._send({"id": name, "end": True})

    def _send(self, value: Mapping[str, Any]) -> None:
        try:
            with self._lock:
                self._link.sendall(json.dumps(value).encode() + b"\n")
        except OSError:
            raise self._gone() from None

    def _read(self) -> None:
        """In a thread: what comes back."""
        try:
            for line in self._lines:
                found = json.loads(line)
                self._ends.pop(found["id"]).set_result(found)
        except (OSError, ValueError):
            pass
        for end in list(self._ends.values()):
            if not end.done() and self._is_closing:
                end.set_result({"ended": "stopped"})
            elif not end.done():
                end.set_exception(self._gone())

    def _gone(self) -> TaskError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        why = "" if code is None else f": signal {-code} ended it" if code < 0 else f": it exited with code {code}"
        return TaskError(f"the agents' process is gone{why}. Episodes that had not ended are run again with --resume.")


def _why_not_loaded(agent: str, first: Mapping[str, Any]) -> str:
    if kept := first.get("kept"):
        return f"agent {agent!r} makes a client when it is loaded: {printable(', '.join(kept))}. {AT_IMPORT}"
    what = "" if is_function(agent) and ".py:" in first["error"] else " (is it a function, or a command?)"
    is_sdk = "No module named 'openai'" in first["error"]
    hint = " Its process needs `pip install openai` for the client." if is_sdk else ""
    return f"agent {agent!r} cannot be loaded{what}: {printable(first['error'])}.{hint}"


def _reward_of(
    episode: Episode, result: Mapping[str, Any], reward_file: Path, stdout: str, *, is_python: bool
) -> tuple[float | None, str]:
    """The reward, and what is wrong where there is none. What the agent returned comes first, then what it sent
    (`POST /v1/reward`), what it wrote into its file, and of a command the last line that it printed."""
    if is_python and "no_reward" in result:
        return None, result["no_reward"]
    if is_python and result.get("reward") is not None:
        return _checked(result["reward"], "it returned")
    if episode.reward is not None:
        return episode.reward, ""
    if None in episode.no_rewards:
        return None, episode.no_rewards[None]
    lines = [line for line in stdout.splitlines() if line.strip()]
    if reward_file.is_file():
        text, where = reward_file.read_text(errors="replace")[:500].strip(), "its reward file holds"
    elif is_python:
        return None, "it returned nothing, and sent no reward"
    else:
        text, where = (lines[-1].strip() if lines else ""), "its last line is"
    try:
        return _checked(float(text), where)
    except ValueError:
        return None, f"{where} {printable(text)[:200]!r}, no number"


def _checked(value: object, where: str) -> tuple[float | None, str]:
    """By the rule of all rewards."""
    found = number(value, where)
    return (None, found.message) if isinstance(found, FailedCall) else (found, "")
