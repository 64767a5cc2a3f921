"""What is read of the package `verifiers` (0.4), which has no types of its own here: its environments and tasks, and
what an episode leaves."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self


class Typed(Protocol):
    """A runtime, or a part of a message."""

    type: str


class Named(Protocol):
    """A harness."""

    id: str


class Config(Protocol):
    """A pydantic model."""

    model_fields_set: set[str]

    def model_copy(self, *, update: Mapping[str, object]) -> Self: ...
    @classmethod
    def model_validate(cls, given: Mapping[str, object]) -> Self: ...


class AgentConfig(Config, Protocol):
    """An agent of an environment."""

    harness: Named | None
    model: object
    client: object
    runtime: Typed
    timeout: Config


class ToolsetConfig(Protocol):
    """Where a toolset runs."""

    url: str | None
    runtime: Typed


class Toolset(Protocol):
    """Tools with a state."""

    config: ToolsetConfig
    server_name: str | None

    async def setup(self) -> None: ...
    async def setup_task(self, data: object) -> None: ...
    def register(self, server: object) -> None: ...


class JudgeConfig(Protocol):
    """The server of a judge."""

    base_url: str
    api_key_var: str


class Judge(Protocol):
    """A model that scores."""

    config: JudgeConfig
    reward_name: str
    score: Callable[..., object]


class TaskData(Protocol):
    """A row of a taskset."""

    skills: object


class Task(Protocol):
    """What an episode is about."""

    config: object
    data: TaskData
    key: object
    hash: object

    def toolsets(self, config: object) -> Iterable[Toolset]: ...
    def hooks(self, kind: str) -> Sequence[Callable[..., object]]: ...
    def plugged_judges(self) -> Sequence[Judge]: ...


class Taskset(Protocol):
    """Tasks, and the tools that they share."""

    config: object

    def take(self, number: int) -> Iterable[Task]: ...
    def toolsets(self, config: object) -> Iterable[Toolset]: ...


class EnvironmentConfig(Config, Protocol):
    """Its settings, with its name."""

    env_id: str


class Environment(Protocol):
    """What makes episodes of tasks, and scores them."""

    config: EnvironmentConfig
    taskset: Taskset

    async def setup(self, agents: object) -> None: ...
    async def run(self, task: Task, agents: object) -> None: ...
    async def finalize(self, task: Task, episode: object) -> None: ...


class Failure(Protocol):
    """Why a trace failed."""

    type: str
    message: str


class TracedAgent(Protocol):
    """Whose turns these are."""

    name: str
    trainable: bool


class TracedTask(Protocol):
    """What it was about."""

    data: object


class Trace(Protocol):
    """What an agent did in an episode."""

    agent: TracedAgent
    task: TracedTask
    state: object
    reward: float
    rewards: Mapping[str, float | None]
    ok: bool
    last_error: Failure | None
    stop_condition: str | None
    calls: list[object]

    def stop(self, condition: str) -> None: ...


class ModelCalls(Protocol):
    """The model calls of an agent."""

    trace: Trace
    stopped: bool
    on_turn_input: Callable[[], None] | None

    async def refused(self) -> object: ...
    async def rewrite_request(self, request: object) -> tuple[object, object, str | None]: ...
    async def rewrite_response(self, response: object) -> tuple[object, object, str | None]: ...
    async def gate_tool_calls(self, node: object) -> str | None: ...


class AskedTool(Protocol):
    """A call of a tool."""

    id: str
    name: str
    arguments: str


class Message(Protocol):
    """Part of a conversation."""

    content: str | list[Any] | None
    tool_calls: list[AskedTool] | None

    def model_dump(self, **settings: object) -> dict[str, Any]: ...
