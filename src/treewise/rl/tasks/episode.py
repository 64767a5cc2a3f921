"""An episode of several turns: token ids that only grow, the environment beside them, and branches from any turn.

What its environment does (`begin_turn`, `begin_branch`) may run in another thread, with that of other episodes, and so
may tokenizing what it answers; all else belongs to one thread.
"""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from treewise.data.render.messages import Message
from treewise.errors import ConfigError, DataError, TaskError
from treewise.rl.recorder.call_ids import call_ids
from treewise.rl.recorder.chat_tokens import MAX_PROMPT, ChatTokens, ReadTurn, ToolCall
from treewise.rl.tasks import environment as env
from treewise.rl.tasks.calls import Calls, FailedCall, Job
from treewise.rl.tasks.environment import StateMethod, TurnRecord
from treewise.rl.tasks.protocol import TaskItem, TurnTask

EndReason = Literal["answered", "done", "max_turns", "length", "failed"]


@dataclass(slots=True)
class _SampledTurn:
    """A sampled turn while its environment answers.

    read: what it says. message: as environments get it. saved: the environment before it. replies: the messages that
    follow it where the episode goes on, and reply_ids what the template writes of them. written: the turn as the
    template gets it.
    """

    read: ReadTurn
    message: Message
    calls: tuple[ToolCall, ...]
    end_id: int
    finish_reason: str
    saved: object = None
    answers: list[str] = field(default_factory=list)
    end_reason: EndReason | None = None
    replies: list[Message] = field(default_factory=list)
    reply_ids: list[int] = field(default_factory=list)
    written: Message = field(default_factory=dict)


@dataclass(slots=True)
class EnvironmentEpisode:
    """One episode, from `start_episodes`.

    messages: the conversation, each turn as its text; written: as the template gets it. token_ids: the prompt and all
    that followed; what the next turn is sampled from. turn_starts: where each turn's sampled ids begin. end_reason:
    None while it goes on. last: the turn that ended it.
    """

    task: TurnTask
    item: TaskItem
    chat: ChatTokens
    name: str
    environment: Any
    method: StateMethod
    first: str | list[Message] | None
    schemas: list[dict[str, Any]]
    messages: list[Message]
    written: list[Message]
    token_ids: list[int]
    calls: Calls
    turn_starts: list[int] = field(default_factory=list)
    records: list[TurnRecord] = field(default_factory=list)
    end_reason: EndReason | None = None
    failure: FailedCall | None = None
    last: Message | None = None
    num_branches: int = 0
    _turn: _SampledTurn | None = None
    _restore: Callable[[], Any] | None = None  # of a branch that is not opened
    _lock: Any = field(default_factory=threading.Lock)  # of all branches: one copies at a time

    @property
    def num_turns(self) -> int:
        """Turns that were sampled."""
        return len(self.turn_starts)

    def begin_turn(self, token_ids: Sequence[int], finish_reason: str) -> Callable[[], None]:
        """Takes a sampled turn; what its environment has to do then, before `end_turn`. It raises `DataError` where the
        chat template cannot continue an episode; see `ChatTokens.answer_ids`.
        """
        assert self.end_reason is None
        ids = [int(i) for i in token_ids]
        read, message, calls = self._read(ids, is_cut=finish_reason == "length")
        self.turn_starts.append(len(self.token_ids))
        self.token_ids += ids
        self._turn = _SampledTurn(read, message, calls, ids[-1], finish_reason)
        return partial(self._answer, self._turn)

    def end_turn(self) -> None:
        """Appends what the environment answered, or ends the episode."""
        turn = self._turn
        assert turn is not None
        self._turn = None
        self.records.append(TurnRecord(turn.calls[: len(turn.answers)], tuple(turn.answers), turn.saved))
        self.end_reason = turn.end_reason
        if turn.end_reason is None:
            self.messages += [{"role": "assistant", "content": turn.read.text}, *turn.replies]
            self.written += [turn.written, *turn.replies]
            self.token_ids += turn.reply_ids
        else:
            self.last = turn.message

    def begin_branch(self, turn: int) -> "EnvironmentEpisode":
        """An independent episode that stands before turn `turn` (0 is the first); `num_turns` copies all turns. Its
        environment is there once it was opened.
        """
        assert 0 <= turn < self.num_turns + (self.end_reason is None)
        self.num_branches += 1
        written = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        written = written[len(written) - self.num_turns :]
        end = self.turn_starts[turn] if turn < self.num_turns else len(self.token_ids)
        num_messages = written[turn] if turn < len(written) else len(self.messages)
        return EnvironmentEpisode(
            self.task,
            self.item,
            self.chat,
            f"{self.name}.{self.num_branches}",
            None,
            self.method,
            self.first,
            self.schemas,
            self.messages[:num_messages],
            self.written[:num_messages],
            self.token_ids[:end],
            self.calls,
            self.turn_starts[:turn],
            self.records[:turn],
            _restore=partial(self._state, turn),
            _lock=self._lock,
        )

    def open(self) -> None:
        """Brings the environment of a branch back to its turn.

        Raises:
            TaskError: that cannot be.
        """
        if self._restore is not None:
            self.environment, self._restore = self._restore(), None

    def reward_job(self) -> Job:
        """The call that gives the environment's reward.

        Raises:
            ConfigError: the environment has no `get_reward`.
        """
        get_reward = getattr(self.environment, "get_reward", None)
        if get_reward is None:
            raise ConfigError(f"{self.item.key}: the environment has no get_reward.")
        messages = [*self.messages, *([] if self.last is None else [self.last])]
        return Job(env.reward_of, (self.environment, messages), get_reward)

    def _saved(self) -> object:
        """The environment before a turn, or why there is none; what can no longer be copied is replayed."""
        if self.method == "fork":
            return self._forked(self.environment)
        try:
            return env.snapshot(self.environment, self.method)
        except Exception:  # an environment may hold more with every turn
            self.method = "replay"
            return None

    def _forked(self, environment: Any) -> object:
        return self.calls.run(env.snapshot, environment, "fork", owner=getattr(environment, "fork", None))

    def _read(self, ids: list[int], *, is_cut: bool) -> tuple[ReadTurn, Message, tuple[ToolCall, ...]]:
        """A turn taken apart, as a message, and what the environment is called with."""
        read = self.chat.read(ids, self.chat.decode(self.token_ids[-MAX_PROMPT:]), self.schemas)
        read = replace(read, call_ids=tuple(call_ids([*self.token_ids, *ids], len(read.parts.told))))
        text, calls = read.text, read.calls
        if self.task.text_tool is not None:
            tool = next(
                schema["function"] for schema in self.schemas if schema["function"]["name"] == self.task.text_tool
            )
            calls = (ToolCall(self.task.text_tool, {next(iter(tool["parameters"]["properties"])): text.strip()}),)
        calls = () if is_cut else calls
        message: Message = {"role": "assistant", "content": text}
        if not env.answers_turns(self.environment):
            given = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
            return read, message | ({"tool_calls": given} if calls else {}), calls
        said, thought = read.parts.said, read.parts.reasoning
        message["content"] = read.parts.content if said is None else said
        message |= {"reasoning_content": thought} if thought else {}
        message["tool_calls"] = [asdict(call) for call in calls]
        message["num_tokens"] = [len(self.token_ids), len(ids)]
        return read, message, () if is_cut else (ToolCall(env.RESPOND, message),)

    def _answer(self, turn: _SampledTurn) -> None:
        self._carry_out(turn)
        if turn.finish_reason == "length":
            turn.end_reason = "length"
        elif self.failure is not None:
            turn.end_reason = "failed"
        elif not turn.calls:
            turn.end_reason = "answered"
        elif getattr(self.environment, "done", False) is True:
            turn.end_reason = "done"
        elif self.num_turns >= self.task.max_turns:
            turn.end_reason = "max_turns"
        else:
            self._reply(turn)

    def _carry_out(self, turn: _SampledTurn) -> None:
        saved = self._saved()
        if isinstance(saved, FailedCall):
            self._fail(saved, "fork before")
            return
        turn.saved = saved
        for call in turn.calls:
            owner = getattr(self.environment, call.name, None)
            result = self.calls.run(env.carried_out, self.environment, call, owner=owner)
            if isinstance(result, FailedCall):
                self._fail(result, f"tool {call.name} of")
                return
            text, self.environment = result
            turn.answers.append(text)

    def _fail(self, found: FailedCall, what: str) -> None:
        self.failure = FailedCall(found.kind, f"{what} turn {self.num_turns - 1}: {found.message}", found.cause)

    def _reply(self, turn: _SampledTurn) -> None:
        is_text = self.task.text_tool is not None
        turn.replies = [
            {"role": "user", "content": answer}
            if is_text
            else {"role": "tool", "content": answer, "name": call.name, "tool_call_id": call.id}
            for call, answer in zip(turn.calls, turn.answers, strict=True)
        ]
        if env.answers_turns(self.environment):
            turn.replies = [message for answer in turn.answers for message in json.loads(answer)]
        location = f"{self.item.key}, episode {self.name}, turn {self.num_turns - 1}"
        shown = self.schemas if self.task.text_tool is None else None
        try:
            turn.written, ids = self._following(turn, shown, location)
        except DataError:
            if all(call.problem is None for call in turn.calls):
                raise
            turn.end_reason = (
                "answered"  # templates that answer calls alone have no way to tell what was wrong with one
            )
            return
        turn.reply_ids = ids.tolist()

    def _following(
        self, turn: _SampledTurn, tools: list[dict[str, Any]] | None, location: str
    ) -> tuple[Message, np.ndarray]:
        """The turn as the template gets it, and the ids that follow it: as its text, and where the template takes none
        (GPT-OSS), as the calls in it."""
        text: Message = {"role": "assistant", "content": turn.read.text}
        try:
            return text, self.chat.answer_ids(self.written, text, turn.end_id, turn.replies, tools, location)
        except DataError:
            if "tool_calls" not in turn.read.message:
                raise
        called = self.chat.template.prepared(turn.read.message, location)
        return called, self.chat.answer_ids(self.written, called, turn.end_id, turn.replies, tools, location)

    def _state(self, turn: int) -> object:
        source = self.environment if turn == self.num_turns else self.records[turn].snapshot
        if self.method == "deepcopy":
            with self._lock, suppress(Exception):  # of which each kind of object raises its own; as `_saved`
                return env.snapshot(source, self.method)
        if self.method == "fork":
            with self._lock:
                found = self._forked(source)
        else:
            played = (self.task.environment, self.item, self.first, self.records[:turn], self.name)
            found = self.calls.run(env.replayed, *played, owner=self.task.environment)
        if isinstance(found, FailedCall):
            own = found.cause if isinstance(found.cause, TaskError) else None
            raise TaskError(str(own) if own else f"{self.item.key}, episode {self.name}: {found.message}")
        return found


def start_episodes(
    task: TurnTask, items: Sequence[TaskItem], chat: ChatTokens, calls: Calls
) -> list[EnvironmentEpisode]:
    """New episodes: environments are reset, and their text joins the last message of each prompt.

    calls: how environments are called.

    Raises:
        ConfigError: the chat template does not write the tools; a tool has no schema.
        TaskError: `reset` fails.
    """
    results = calls.run_together([Job(env.opened, (task.environment, item), task.environment) for item in items])
    episodes = []
    for item, found in zip(items, results, strict=True):
        if isinstance(found, FailedCall):
            raise TaskError(f"{item.key}: the environment cannot be reset: {found.message}") from found.cause
        environment, first = found
        schemas, method = env.tool_schemas(environment, item.key), env.state_method(environment)
        messages = env.opening(item.prompt, first)  # type: ignore[arg-type]  # of environments always messages
        ids = list(chat.prompt_ids(messages, schemas if task.text_tool is None else None, item.key))
        episodes.append(
            EnvironmentEpisode(
                task, item, chat, "0", environment, method, first, schemas, messages, list(messages), ids, calls
            )
        )
    return episodes
