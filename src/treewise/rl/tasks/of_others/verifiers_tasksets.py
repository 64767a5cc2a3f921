"""`verifiers:NAME`: a taskset of the package `verifiers` (0.4), its prompts, tools and rewards as they are.

The loop takes the place of the package's harness; tools are called in this process, of toolsets of each episode's own.
"""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treewise.errors import ConfigError, pip_install
from treewise.rl.tasks.environment import EnvironmentTask


def verifiers_task(name: str, num_tasks: int = 1000, **settings: Any) -> EnvironmentTask:
    """A task of so many tasks of a taskset. settings: of `EnvironmentTask`, others of the taskset's configuration.

    Raises:
        ConfigError: no such taskset, or one that needs a container, a runtime of its own or several agents.
    """
    own = {key: settings.pop(key) for key in list(settings) if key in EnvironmentTask.__slots__}
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ConfigError(f"verifiers:{name} needs {error.name}: {pip_install('verifiers')}.") from None
    try:
        runner, config = vf.environment_class(name), vf.taskset_config_type(name)
        taskset = vf.load_taskset(config(id=name, **settings))
        tasks: list[Any] = list(taskset.take(num_tasks))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers:{name}: {error}") from None
    kind = type(tasks[0]) if tasks else vf.Task
    needs = ["has no tasks"] * (not tasks) + ["needs a container"] * kind.NEEDS_CONTAINER
    needs += [f"runs its agents itself ({runner.__name__})"] * (runner is not vf.SingleAgentEnv)
    has_runtime = (kind.setup, kind.finalize) != (vf.Task.setup, vf.Task.finalize)
    if needs := needs + ["sets a runtime up (setup, finalize)"] * has_runtime:
        raise ConfigError(f"verifiers:{name} {' and '.join(needs)}; sample it with its own tools, and give its rows.")

    def toolsets(task: Any) -> list[Any]:
        return [*type(taskset).toolsets(taskset.config), *type(task).toolsets(task.config)]

    methods = {key: _as_method(key, tool) for key, tool in _tools(toolsets(tasks[0])).items()}
    factory = type("Conversation", (Conversation,), {"_tasks": tasks, "_toolsets": staticmethod(toolsets), **methods})
    rows = [{"prompt": _prompt_of(task.data), "number": number} for number, task in enumerate(tasks)]
    return EnvironmentTask(factory, rows=rows, **{"name": f"verifiers:{name}", **own})


class Conversation:
    """An environment of TRL's form, whose tools are those of a taskset. Played again, not copied."""

    can_be_copied = False
    _tasks: Sequence[Any]
    _toolsets: Callable[[Any], list[Any]]

    async def reset(self, number: int) -> None:
        """Sets the tools of a task up."""
        self._task = self._tasks[number]
        self._own = self._toolsets(self._task)
        for each in self._own:
            await each.setup()
            await each.setup_task(self._task.data)

    def take_messages(self, messages: Sequence[Any]) -> None:
        """The whole transcript, before `get_reward`."""
        self._messages = messages

    def get_reward(self) -> float:
        """The task's own rewards of the transcript, weighted and added up."""
        import verifiers.v1 as vf

        nodes = [
            vf.MessageNode(parent=n - 1 if n else None, message=_typed(each, n), sampled=each["role"] == "assistant")
            for n, each in enumerate(self._messages)
        ]
        task = self._task
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        state: dict[str, Any] = {"state": self._own[0].state} if self._own else {}
        trace: Any = vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes, **state)
        asyncio.run(task.score(trace))
        return float(trace.reward)


def _prompt_of(data: Any) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(each.model_dump(exclude_none=True) for each in data.prompt or [])]


def _typed(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message in the package's form: calls with their number and arguments as JSON."""
    typed = {key: message[key] for key in ("role", "content", "name", "reasoning_content") if key in message}
    typed |= {"tool_call_id": str(message.get("tool_call_id", ""))} if message["role"] == "tool" else {}
    for i, call in enumerate(message.get("tool_calls") or ()):
        function = {"arguments": {}, **call.get("function", call)}
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"])
        typed.setdefault("tool_calls", []).append({**function, "id": f"{number}.{i}", "type": "function"})
    return typed


def _tools(toolsets: Sequence[Any]) -> dict[str, Any]:
    members = (getattr(each, name) for each in toolsets for name in dir(type(each)) if name[0] != "_")
    tools = (each for each in members if callable(each) and getattr(each, "tool", False) is True)
    return {getattr(each, "tool_name", None) or each.__name__: each for each in tools}


def _as_method(key: str, tool: Any) -> Callable[..., Any]:
    """A tool as a method of the conversation, described as `get_json_schema` reads it."""

    @functools.wraps(tool.__func__)
    def called(self: Conversation, **arguments: Any) -> Any:
        return _tools(self._own)[key](**arguments)

    text, names = inspect.getdoc(tool) or key, inspect.signature(tool).parameters
    missing = [] if "Args:" in text or not names else ["", "Args:", *(f"    {each}: {each}" for each in names)]
    called.__doc__ = "\n".join([text, *missing])
    return called
