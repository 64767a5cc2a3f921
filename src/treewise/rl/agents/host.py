"""A process that starts agents, each in processes of its own, and ends all of them.

It imports the user's module once, without torch, under an address and a key of no episode (`kept_since_import`), and
forks for each episode, which costs milliseconds. An episode is a
warden, which only waits, and below it the agent, in a session of its own. Whatever an agent started becomes, once its
warden is gone, a child of this process (on Linux, where it and the wardens are subreapers), and is killed: also what
left the agent's group, and where the agent died. Where the run itself is gone, the link to it closes, and all ends.
Where this process is gone, too, each warden ends what is below it.

It runs in this Python or in another one, with the agent's own packages, which need not hold treewise: only the standard
library is imported here, and what the agent itself imports.

Lines of JSON go over the link: `{"id", "task", "environment", "seconds"}` starts an episode, `{"id", "end": true}` ends
one; `{"id", "result"}` comes back.
"""

import asyncio
import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import math
import os
import random
import selectors
import shlex
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, SupportsFloat

KEPT_BYTES = 16_384  # of an agent's output, its end
SUBREAPER, DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG of prctl
STREAMS = ("stdout", "stderr", "result")


@dataclass(slots=True)
class Running:
    """An episode. pipes: file descriptors by what comes through them."""

    id: str
    warden: int
    end: float
    pipes: dict[int, str]
    texts: dict[str, bytearray] = field(default_factory=lambda: {name: bytearray() for name in STREAMS})
    num_bytes: int = 0
    ended: str | None = None  # why it was ended from outside


class Host:
    """The process. link: to the run. agent: a function, or the words of a command."""

    def __init__(self, link: socket.socket, agent: Any) -> None:
        self._link, self._agent, self._pid = link, agent, os.getpid()
        self._running: dict[int, Running] = {}  # by warden
        self._selector, self._lines = selectors.DefaultSelector(), b""
        wakes, woken = os.pipe()
        for end in (wakes, woken, link.fileno()):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the run decides
        self._selector.register(link, selectors.EVENT_READ, None)
        self._selector.register(wakes, selectors.EVENT_READ, None)
        self._wakes = wakes
        _become_subreaper()

    def serve(self) -> None:
        """Starts and ends agents as the run asks, until the link to it is closed."""
        while True:
            ends = [running.end for running in self._running.values()]
            limit = min(max(0.0, min(ends) - time.monotonic()), 3600.0) if ends else None
            for key, _ in self._selector.select(limit):
                if key.fileobj is self._link:
                    if not self._take_lines():
                        return self._end_all()
                elif key.fileobj == self._wakes:
                    os.read(self._wakes, 4096)
                elif key.data is not None:
                    self._read(key.data, int(key.fd))
            now = time.monotonic()
            for running in list(self._running.values()):
                if now >= running.end:
                    self._stop(running, "timeout")
            self._reap()

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _take_lines(self) -> bool:
        """What the run asks for; whether it is still there."""
        try:
            part = self._link.recv(1 << 20)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if not part:
            return False
        *lines, self._lines = (self._lines + part).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            if asked.get("end"):
                for running in self._running.values():
                    if running.id == asked["id"]:
                        self._stop(running, "ended")
            else:
                self._start(asked)
        return True

    def _start(self, asked: dict[str, Any]) -> None:
        pipes = {name: os.pipe() for name in STREAMS}
        warden = os.fork()
        if not warden:
            _guard(lambda: self._warden(asked, {name: ends[1] for name, ends in pipes.items()}))
        for _, write in pipes.values():
            os.close(write)
        reads = {ends[0]: name for name, ends in pipes.items()}
        running = Running(asked["id"], warden, time.monotonic() + asked["seconds"], reads)
        self._running[warden] = running
        for pipe in reads:
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ, running)

    def _read(self, running: Running, pipe: int) -> bool:
        """What came through a pipe; whether more may come."""
        try:
            part = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        if not part:
            self._selector.unregister(pipe)
            os.close(pipe)
            del running.pipes[pipe]
            return False
        text = running.texts[running.pipes[pipe]]
        running.num_bytes += len(part)
        text += part
        if running.pipes[pipe] != "result" and len(text) > 2 * KEPT_BYTES:
            del text[:-KEPT_BYTES]
        return True

    def _stop(self, running: Running, why: str) -> None:
        running.ended, running.end = running.ended or why, math.inf
        os.kill(running.warden, signal.SIGKILL)

    def _reap(self) -> None:
        """Wardens that have ended, and all that their agents left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            running = self._running.pop(pid, None)
            if running is None:
                continue
            self._sweep()
            for pipe in list(running.pipes):
                while self._read(running, pipe):
                    pass
                if pipe in running.pipes:
                    self._selector.unregister(pipe)
                    os.close(pipe)
            texts = {name: text[-KEPT_BYTES:].decode(errors="replace") for name, text in running.texts.items()}
            texts["result"] = running.texts["result"].decode(errors="replace")
            code = os.waitstatus_to_exitcode(status)
            self._send({"id": running.id, "ended": running.ended, "code": code, "bytes": running.num_bytes, **texts})

    def _sweep(self) -> None:
        """Kills the children that are no wardens: they belonged to agents that have ended."""
        for _ in range(1000):
            strays = [pid for pid in _children() if pid not in self._running]
            if not strays:
                return
            for pid in strays:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    continue

    def _end_all(self) -> None:
        for warden in list(self._running):
            os.kill(warden, signal.SIGKILL)
            os.waitpid(warden, 0)
        self._running.clear()
        self._sweep()

    def _send(self, value: dict[str, Any]) -> None:
        self._link.settimeout(None)
        try:
            self._link.sendall(json.dumps(value).encode() + b"\n")
        except ConnectionError:
            pass
        finally:
            self._link.settimeout(0.0)

    # -- in a process of an episode -----------------------------------------------------------------------------------

    def _warden(self, asked: dict[str, Any], pipes: dict[str, int]) -> None:
        """Waits for the agent, and ends with its exit code; where a signal ended it, with 128 and more."""
        self._selector.close()
        self._link.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _end_with_all_below)
        _become_subreaper()
        _end_with_parent(self._pid, signal.SIGTERM)
        warden, agent = os.getpid(), os.fork()
        if not agent:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _end_with_parent(warden, signal.SIGKILL)
            _guard(lambda: self._agent_process(asked, pipes))
        for pipe in pipes.values():
            os.close(pipe)
        os.closerange(0, 3)
        while True:  # also for what the agent leaves, so that no dead process is kept
            pid, status = os.wait()
            if pid == agent:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)

    def _agent_process(self, asked: dict[str, Any], pipes: dict[str, int]) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(pipes["stdout"], 1)
        os.dup2(pipes["stderr"], 2)
        os.environ.update(asked["environment"])
        if isinstance(self._agent, list):
            try:
                os.execvp(self._agent[0], self._agent)
            except OSError as error:
                os.write(2, f"{self._agent[0]}: {error.strerror}\n".encode())
                os._exit(127)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        random.seed(asked["seed"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(asked["seed"] % (1 << 32))
        os.write(pipes["result"], json.dumps(_outcome(self._agent, asked["task"])).encode())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _guard(work: Callable[[], object]) -> NoReturn:
    """In a fork: nothing of the parent's goes on."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _outcome(function: Callable[..., object], task: object) -> dict[str, object]:
    """What the agent returned, or raised."""
    try:
        takes_client = len(inspect.signature(function).parameters) > 1
        if inspect.iscoroutinefunction(function):
            value: object = asyncio.run(_awaited(function, task, takes_client=takes_client))
        elif takes_client:
            value = function(task, _client())
        else:
            value = function(task)
    except BaseException as error:  # an agent may raise anything, SystemExit included
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename != __file__] or frames
        traceback.print_exc()
        return {"error": f"{own[-1].filename}:{own[-1].lineno}: {type(error).__name__}: {error}"[:2000]}
    return {"reward": None} if value is None else _reward_of(value)


def _reward_of(value: object) -> dict[str, object]:
    """What an agent returned, as a number if it is one; which numbers are rewards is the run's to say."""
    try:
        if isinstance(value, SupportsFloat):
            return {"reward": float(value)}
        return {"no_reward": f"it returned {value!r}"[:500] + ", no number"}
    except OverflowError:
        return {"no_reward": "it returned a number that no float holds"}
    except Exception as error:  # an object of the agent's own may raise anything
        return {"no_reward": f"it returned {type(value).__name__}, no number: {error}"[:500]}


async def _awaited(function: Callable[..., Awaitable[object]], task: object, *, takes_client: bool) -> object:
    if not takes_client:
        return await function(task)
    async with _client() as client:
        return await function(task, client)


def _client() -> Any:
    """The official SDK's asynchronous client, with `reward(call_id, value)`."""
    import openai

    class Client(openai.AsyncOpenAI):
        """Calls of this episode."""

        async def reward(self, call_id: str, value: float, choice: int = 0) -> None:
            """Gives a call of this episode, or one of its choices, a reward of its own."""
            body = {"call_id": call_id, "reward": value, "choice": choice}
            await self.post("/reward", body=body, cast_to=object)

    return Client()  # base URL and key are in the environment


def _children() -> list[int]:
    """Process ids of the children of this process."""
    own = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
    except OSError:
        return []


def _become_subreaper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def _end_with_parent(parent: int, number: int) -> None:
    """Also where that is killed, by a signal; one that is gone already sends none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, number, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def _end_with_all_below(number: int, _frame: object) -> NoReturn:
    """In a warden: ends all that its agent has started, which becomes its child as soon as what started it is gone."""
    while below := _children():
        for pid in below:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    os._exit(128 + number)


def loaded(agent: str) -> Any:
    """The function that `module:name` or `file.py:name` names, or the words of a command."""
    if not is_function(agent):
        return shlex.split(agent)
    location, _, name = agent.rpartition(":")
    sys.path.insert(0, str(Path.cwd()))
    if location.endswith(".py"):
        path = Path(os.path.expanduser(location)).resolve()  # `Path` raises where there is no such user
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(location)
    function = getattr(module, name)
    if len(inspect.signature(function).parameters) > 1:
        import openai  # noqa: F401  # before the forks
    return function


def kept_since_import(key: str, address: str) -> list[str]:
    """What holds the key under which the agent's module was loaded, as `my_agent.client (openai.OpenAI)`: clients of
    whatever SDK, and names of modules, by what the garbage collector sees. Such a client is of no episode. Nor is one
    that has this address with another key, which the module gave it.
    """
    modules = {id(vars(module)): name for name, module in list(sys.modules.items()) if hasattr(module, "__dict__")}
    names = {
        id(value): f"{module.__name__}.{name}"
        for module in list(sys.modules.values())
        if isinstance(module, type(sys))
        for name, value in list(vars(module).items())
    }
    found = []
    for holder in gc.get_objects():
        held = gc.get_referents(holder)
        is_there = any(type(each).__name__ == "URL" and str(each).startswith(address) for each in held)
        has_own_key = is_there and type(getattr(holder, "api_key", None)) is str
        if not has_own_key and not any(type(each) is str and each == key for each in held):
            continue
        kind = type(holder)
        if id(holder) in modules:
            of_module: dict[str, object] = holder
            own_names = [name for name, value in of_module.items() if type(value) is str and value == key]
            found += [f"{modules[id(holder)]}.{name}" for name in own_names]
        elif kind.__module__ not in ("builtins", "os"):
            own, name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}", names.get(id(holder))
            found.append(own if name is None else f"{name} ({own})")
    clients = [each for each in dict.fromkeys(found) if "SecretStr" not in each]  # which a client holds
    return (clients or found)[:5]


def is_function(agent: str) -> bool:
    """Whether it names a Python function; else it is a command."""
    location, colon, name = agent.rpartition(":")
    is_path = location.endswith(".py") or all(part.isidentifier() for part in location.split("."))
    return bool(colon) and name.isidentifier() and is_path and " " not in agent


def main() -> None:
    """Serves the agent; the run's folder of episodes goes with it, also where a signal ended the run."""
    try:
        serve(sys.argv[2])
    finally:
        shutil.rmtree(sys.argv[3], ignore_errors=True)


def serve(name: str) -> None:
    """Loads the agent, says whether that went well, and serves."""
    link = socket.socket(fileno=int(sys.argv[1]))
    key, address = os.environ["OPENAI_API_KEY"], os.environ["ANTHROPIC_BASE_URL"]  # of no episode
    try:
        agent = loaded(name)
    except BaseException as error:  # of the user's module
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        places = [f"{frame.filename}:{frame.lineno}: " for frame in frames if frame.filename != __file__]
        link.sendall(json.dumps({"error": f"{''.join(places[-1:])}{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    if is_function(name) and (kept := kept_since_import(key, address)):
        link.sendall(json.dumps({"error": "", "kept": kept}).encode() + b"\n")
        return
    gc.collect()
    gc.freeze()  # else the first collection of every fork touches, and so copies, all that was loaded here
    link.sendall(json.dumps({"ready": True}).encode() + b"\n")
    Host(link, agent).serve()


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the run has ended meanwhile
        main()
