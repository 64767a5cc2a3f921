"""`verifiers:NAME` as the trainer sees it: a task whose environments live in a process of their own (`worker.py`).

The process runs what the package's own worker runs: the environment, its rules and its rewards. This side samples the
turns and keeps their tokens; an environment sees them as messages.
"""

import importlib.util
import itertools
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from treewise.errors import ConfigError, TaskError, pip_install
from treewise.rl.tasks.environment import EnvironmentTask
from treewise.rl.tasks.of_others.verifiers_env.process import Process

logger = logging.getLogger("treewise")


def verifiers_task(
    name: str,
    num_tasks: int = 1000,
    runtime: str | Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
    processes: int = 1,
    **settings: Any,
) -> EnvironmentTask:
    """The task of an environment.

    Parameters:
        name: of its taskset.
        num_tasks: the most tasks that are taken of it.
        runtime: where the package runs what belongs to a task, by name or as its configuration; None: in a folder of
            this machine.
        env: fields of the environment's configuration.
        processes: that episodes are dealt out to; what blocks in an environment's `run` holds up those of its process.
        settings: of `EnvironmentTask`; others are fields of the taskset's configuration.

    Raises:
        ConfigError: no such taskset, or one that the loop does not serve.
    """
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(f"verifiers:{name} needs verifiers: {pip_install('verifiers>=0.4,<0.5')}.")
    own = {key: settings.pop(key) for key in list(settings) if key in EnvironmentTask.__slots__}
    runtime = {"type": runtime} if isinstance(runtime, str) else runtime
    given = {"name": name, "num_tasks": num_tasks, "runtime": runtime, "env": dict(env or {}), "taskset": settings}
    for key, count in (("num_tasks", num_tasks), ("processes", processes)):
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"verifiers:{name}: {key} is {count!r}; it must be an integer, at least 1.")
    started = [Process(f"{__package__}.worker") for _ in range(processes)]
    try:
        found, *_ = [process.ask("begin", **given) for process in started]
    except TaskError as error:
        raise ConfigError(f"verifiers:{name}: {error}") from None
    if found["unsandboxed"]:
        where = "in a folder of this machine, without a sandbox (tasks_settings.runtime names one, as docker)"
        logger.warning("verifiers:%s: %s of its tasks run %s", name, ", ".join(found["unsandboxed"]), where)
    rows = [{"number": number} for number in range(found["num_tasks"])]
    return EnvironmentTask(
        partial(VerifiersEnvironment, itertools.cycle(started)), rows=rows, **{"name": f"verifiers:{name}", **own}
    )


class VerifiersEnvironment:
    """An episode, as an environment that answers whole turns. Played again, not copied."""

    can_be_copied = False

    def __init__(self, processes: Iterator[Process]) -> None:
        self._process = next(processes)
        self._episode = self._process.new_number()
        self._taken: Any = None
        self._cut_off: Any = None
        self.done, self.tools = False, list[dict[str, Any]]()

    def reset(self, number: int) -> list[dict[str, Any]]:
        """Begins a task: the messages of its prompt."""
        weakref.finalize(self, self._process.tell, "close", episode=self._episode)
        opening = self._process.ask("open", task=number, episode=self._episode)
        self.tools = opening["tools"]
        return list(opening["messages"])

    def respond(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Takes a turn: the messages that follow it."""
        self._taken = message
        found = self._process.ask("turn", episode=self._episode, message=message)
        self.done = found["done"]
        return list(found["messages"])

    def take_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """The whole transcript, before `get_reward`: its last message may be a turn that a limit cut off."""
        last = messages[-1]
        self._cut_off = last if "num_tokens" in last and last != self._taken else None

    def get_reward(self) -> float:
        """The environment's reward; ends the episode."""
        return float(self._process.ask("end", episode=self._episode, message=self._cut_off))
