"""An episode of several turns: token ids that only grow, the environment beside them, and branches from any turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treewise.data.render.messages import Message
from treewise.errors import ConfigError, TaskError
from treewise.rl.tasks import environment as env
from treewise.rl.tasks.calls import Calls, FailedCall, Job
from treewise.rl.tasks.chat_tokens import ChatTokens, ToolCall, parse_tool_calls
from treewise.rl.tasks.environment import StateMethod, TurnRecord
from treewise.rl.tasks.protocol import TaskItem, TurnTask

EndReason = Literal["answered", "done", "max_turns", "length", "failed"]


@dataclass(slots=True)
class Episode:
    """One episode, from `start_episode`.

    token_ids: the prompt and all that followed; what the next turn is sampled from. sampled: for each of them, whether
    the model sampled it; only these are trained, all others have weight 0. turn_starts: where each turn's sampled ids
    begin. end_reason: None while it goes on.
    """

    task: TurnTask
    item: TaskItem
    chat: ChatTokens
    name: str
    environment: Any
    method: StateMethod
    first: str | None
    schemas: list[dict[str, Any]]
    messages: list[Message]
    token_ids: list[int]
    sampled: list[bool]
    calls: Calls
    turn_starts: list[int] = field(default_factory=list)
    records: list[TurnRecord] = field(default_factory=list)
    end_reason: EndReason | None = None
    failure: FailedCall | None = None
    num_branches: int = 0

    @property
    def num_turns(self) -> int:
        """Turns that were sampled."""
        return len(self.turn_starts)

    def step(self, token_ids: Sequence[int], finish_reason: str) -> None:
        """Takes a sampled turn, carries its calls out, and appends what the environment answers, or ends.

        Raises:
            ConfigError: the episode has ended.
            DataError: the chat template cannot continue an episode; see `ChatTokens.answer_ids`.
        """
        if self.end_reason is not None:
            raise ConfigError(f"{self.item.key}, episode {self.name} has ended ({self.end_reason}); branch it instead.")
        ids = [int(i) for i in token_ids]
        text, calls = self._calls(ids)
        saved = self._saved()
        self.turn_starts.append(len(self.token_ids))
        self.token_ids += ids
        self.sampled += [True] * len(ids)
        if finish_reason == "length":
            self._record(calls=(), answers=[], saved=saved)
            self.end_reason = "length"
            return
        answers = self._answers(calls)
        self._record(calls, answers, saved)
        if self.failure is not None:
            return
        if not calls:
            self.end_reason = "answered"
        elif getattr(self.environment, "done", False) is True:
            self.end_reason = "done"
        elif self.num_turns >= self.task.max_turns:
            self.end_reason = "max_turns"
        else:
            self._append(text, calls, answers, ids[-1])

    def branch(self, turn: int) -> "Episode":
        """An independent episode that stands before turn `turn` (0 is the first); `num_turns` copies all turns.

        Raises:
            ConfigError: there is no such turn.
            TaskError: the environment cannot be brought back to it.
        """
        if not 0 <= turn <= self.num_turns or (turn == self.num_turns and self.end_reason is not None):
            raise ConfigError(f"{self.item.key}, episode {self.name} has {self.num_turns} turns, and no turn {turn}.")
        self.num_branches += 1
        written = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        written = written[len(written) - self.num_turns :]
        end = self.turn_starts[turn] if turn < self.num_turns else len(self.token_ids)
        return Episode(
            self.task,
            self.item,
            self.chat,
            f"{self.name}.{self.num_branches}",
            self._state(turn),
            self.method,
            self.first,
            self.schemas,
            self.messages[: written[turn]] if turn < len(written) else list(self.messages),
            self.token_ids[:end],
            self.sampled[:end],
            self.calls,
            self.turn_starts[:turn],
            self.records[:turn],
        )

    def reward_job(self) -> Job:
        """The call that gives the environment's reward.

        Raises:
            ConfigError: the environment has no `get_reward`.
        """
        get_reward = getattr(self.environment, "get_reward", None)
        if get_reward is None:
            raise ConfigError(f"{self.item.key}: the environment has no get_reward.")
        return Job(env.reward_of, (self.environment,), get_reward)

    def _saved(self) -> object:
        """The environment before a turn; what can no longer be copied is replayed."""
        try:
            return env.snapshot(self.environment, self.method)
        except Exception:  # an environment may hold more with every turn
            if self.method == "fork":
                raise
            self.method = "replay"
            return None

    def _calls(self, ids: list[int]) -> tuple[str, tuple[ToolCall, ...]]:
        text, calls = parse_tool_calls(self.chat.tokenizer, ids, self.token_ids, self.schemas)
        if self.task.text_tool is None:
            return text, calls
        tool = next(each["function"] for each in self.schemas if each["function"]["name"] == self.task.text_tool)
        return text, (ToolCall(self.task.text_tool, {next(iter(tool["parameters"]["properties"])): text.strip()}),)

    def _answers(self, calls: tuple[ToolCall, ...]) -> list[str]:
        answers: list[str] = []
        for call in calls:
            owner = getattr(self.environment, call.name, None)
            result = self.calls.run(env.carried_out, self.environment, call, owner=owner)
            if isinstance(result, FailedCall):
                message = f"tool {call.name} of turn {self.num_turns - 1}: {result.message}"
                self.failure = FailedCall(result.kind, message, result.cause)
                self.end_reason = "failed"
                break
            text, self.environment = result
            answers.append(text)
        return answers

    def _record(self, calls: tuple[ToolCall, ...], answers: list[str], saved: object) -> None:
        digests = tuple(env.digest(text) for text in answers)
        self.records.append(TurnRecord(calls[: len(digests)], digests, saved))

    def _append(self, text: str, calls: tuple[ToolCall, ...], answers: list[str], end_id: int) -> None:
        role = "tool" if self.task.text_tool is None else "user"
        replies: list[Message] = [
            {"role": role, "content": answer, **({"name": call.name} if role == "tool" else {})}
            for call, answer in zip(calls, answers, strict=True)
        ]
        location = f"{self.item.key}, episode {self.name}, turn {self.num_turns - 1}"
        shown = self.schemas if self.task.text_tool is None else None
        ids = self.chat.answer_ids(self.messages, text, end_id, replies, shown, location).tolist()
        self.messages += [{"role": "assistant", "content": text}, *replies]
        self.token_ids += ids
        self.sampled += [False] * len(ids)

    def _state(self, turn: int) -> object:
        if turn == self.num_turns and self.method != "replay":
            return env.snapshot(self.environment, self.method)
        if self.method != "replay":
            return env.snapshot(self.records[turn].snapshot, self.method)
        played = (self.task.environment, self.item, self.first, self.records[:turn], self.name)
        found = self.calls.run(env.replayed, *played, owner=self.task.environment)
        if isinstance(found, FailedCall):
            own = found.cause if isinstance(found.cause, TaskError) else None
            raise TaskError(str(own) if own else f"{self.item.key}, episode {self.name}: {found.message}")
        return found


def start_episode(task: TurnTask, item: TaskItem, chat: ChatTokens, calls: Calls | None = None) -> Episode:
    """A new episode: the environment is reset, and its text joins the last message of the prompt.

    calls: how the environment is called; None: in threads, with the usual time limit.

    Raises:
        ConfigError: the chat template does not write the tools; a tool has no schema.
        TaskError: `reset` fails.
    """
    calls = Calls() if calls is None else calls
    found = calls.run(env.opened, task.environment, item, owner=task.environment)
    if isinstance(found, FailedCall):
        raise TaskError(f"{item.key}: the environment cannot be reset: {found.message}") from found.cause
    environment, first = found
    schemas = env.tool_schemas(environment, item.key)
    messages = env.opening(item.prompt, first)  # type: ignore[arg-type]  # of environments always messages
    shown = schemas if task.text_tool is None else None
    ids = list(chat.prompt_ids(messages, shown, item.key))
    return Episode(
        task,
        item,
        chat,
        "0",
        environment,
        env.state_method(environment),
        first,
        schemas,
        messages,
        ids,
        [False] * len(ids),
        calls,
    )
