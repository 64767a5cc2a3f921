"""`verifiers:NAME`: a taskset of the package `verifiers` (0.4), its prompts, tools and rewards as they are.

The loop takes the place of the package's harness: tools of the taskset and of its tasks are called in this process, an
instance of each for every episode, and a task's rewards and metrics score the transcript. What needs a container, a
runtime of its own or several agents is an error.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from treewise.errors import ConfigError, pip_install
from treewise.rl.tasks.environment import EnvironmentTask
from treewise.rl.tasks.of_others.verifiers_traces import answer_of, prompt_of, score_of
from treewise.rl.tasks.protocol import RewardRequest, Split, TaskItem, check_held_out, rows_of_split

MAX_TASKS = 1000  # of a taskset without end


def verifiers_task(name: str, num_tasks: int = MAX_TASKS, held_out: float = 0.1, **settings: Any) -> Any:
    """The task of a taskset: of one turn where it has no tools. settings: of `EnvironmentTask`, others of the taskset's
    configuration.

    Raises:
        ConfigError: no such taskset, or one that needs more than this loop has.
    """
    own = {key: settings.pop(key) for key in list(settings) if key in EnvironmentTask.__slots__}
    tasks, toolsets = _loaded(name, settings, num_tasks)
    check_held_out(name, held_out)
    if not toolsets(tasks[0]):
        if own:
            raise ConfigError(f"verifiers:{name} has no tools, so {', '.join(own)} mean nothing here.")
        return Tasks(f"verifiers:{name}", tasks, held_out)
    rows = [{"prompt": prompt_of(task), "number": number} for number, task in enumerate(tasks)]
    shown = _with_tools([tool for each in toolsets(tasks[0]) for tool in _tools(each)])
    factory = partial(shown, tasks, toolsets)
    return EnvironmentTask(factory, rows=rows, held_out=held_out, **{"name": f"verifiers:{name}", **own})


class Tasks:
    """Tasks of one turn (`SingleTurnTask`)."""

    def __init__(self, name: str, tasks: Sequence[Any], held_out: float) -> None:
        self.name, self._tasks, self._held_out = name, tasks, held_out

    def num_items(self, split: Split) -> int:
        """See `Items`."""
        return len(rows_of_split(len(self._tasks), self._held_out, split))

    def item(self, split: Split, index: int) -> TaskItem:
        """See `Items`."""
        rows = rows_of_split(len(self._tasks), self._held_out, split)
        number = rows[index % len(rows)]
        return TaskItem(f"{self.name}/{number}", tuple(prompt_of(self._tasks[number])), {"number": number})

    def rewards(self, requests: Sequence[RewardRequest]) -> list[float]:
        """The tasks' own rewards, weighted and added up."""
        return [
            score_of(self._tasks[each.item.extra["number"]], [*each.item.prompt, answer_of(each)]) for each in requests
        ]


class Conversation:
    """An environment of TRL's form; its tools are those of a taskset (`_with_tools`). Played again, not copied."""

    can_be_copied = False

    def __init__(self, tasks: Sequence[Any], toolsets: Callable[[Any], list[Any]]) -> None:
        self._tasks, self._toolsets = tasks, toolsets

    def reset(self, number: int) -> None:
        """Sets the tools of a task up."""
        self._task = self._tasks[number]
        self._own = self._toolsets(self._task)
        for each in self._own:
            asyncio.run(_set_up(each, self._task.data))
        self._messages: list[Any] = []

    def take_messages(self, messages: Sequence[Any]) -> None:
        """The whole transcript, before `get_reward`."""
        self._messages = list(messages)

    def get_reward(self) -> float:
        """The task's own rewards, weighted and added up."""
        state = next((each.state for each in self._own), None)
        return score_of(self._task, self._messages, state)


async def _set_up(toolset: Any, data: Any) -> None:
    await toolset.setup()
    await toolset.setup_task(data)


def _tools(toolset: Any) -> list[Callable[..., Any]]:
    members = (getattr(toolset, name) for name in dir(type(toolset)) if name[0] != "_")
    return [each for each in members if callable(each) and getattr(each, "tool", False) is True]


def _with_tools(tools: Sequence[Callable[..., Any]]) -> type[Conversation]:
    """A class of conversations whose methods are these tools, described as `get_json_schema` reads them."""

    def method(tool: Any) -> Callable[..., Any]:
        def called(self: Conversation, **arguments: Any) -> Any:
            found = next(each for own in self._own for each in _tools(own) if each.__name__ == tool.__name__)
            return found(**arguments)

        signature, text = inspect.signature(tool), inspect.getdoc(tool) or tool.__name__
        parameters = list(signature.parameters.values())
        if parameters and "Args:" not in text:
            text += "\n\nArgs:\n" + "\n".join(f"    {each.name}: {each.name}" for each in parameters)
        called.__name__, called.__doc__, called.__annotations__ = tool.__name__, text, dict(tool.__annotations__)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        called.__signature__ = signature.replace(parameters=[first, *parameters])  # type: ignore[attr-defined]
        return called

    names = [getattr(each, "tool_name", None) or each.__name__ for each in tools]
    return type("Conversation", (Conversation,), dict(zip(names, map(method, tools), strict=True)))


def _loaded(name: str, settings: Mapping[str, Any], num_tasks: int) -> tuple[list[Any], Callable[[Any], list[Any]]]:
    """Its tasks, and what makes the toolsets of one."""
    try:
        from verifiers.v1.env import Env
        from verifiers.v1.envs.single_agent import SingleAgentEnv
        from verifiers.v1.task import Task
        from verifiers.v1.utils.loaders import environment_class, load_taskset, taskset_class
    except ImportError as error:
        raise ConfigError(f"verifiers:{name} needs {error.name}: {pip_install('verifiers')}.") from None
    try:
        kind: type[Env[Any]] = environment_class(name)
        config = _config_class(taskset_class(name))
        taskset = load_taskset(config(id=name, **settings))
        tasks = list(taskset.take(num_tasks))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers:{name}: {error}") from None
    first = type(tasks[0]) if tasks else Task
    needs = {
        "has no tasks": not tasks,
        f"runs its agents itself ({kind.__name__})": kind is not SingleAgentEnv,
        "needs a container": first.NEEDS_CONTAINER,
        "sets a runtime up (setup, finalize)": first.setup is not Task.setup or first.finalize is not Task.finalize,
    }
    if any(needs.values()):
        what = next(text for text, holds in needs.items() if holds)
        raise ConfigError(f"verifiers:{name} {what}, which an online run does not have; sample it with its own tools.")
    shared = type(taskset).toolsets
    return tasks, lambda task: [*shared(taskset.config), *type(task).toolsets(task.config)]


def _config_class(taskset: type) -> Any:
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.utils.generic import concrete_type

    return concrete_type(taskset, TasksetConfig) or TasksetConfig
