"""Environments of TRL's form, and bringing their state back to an earlier turn.

An environment is an object with `reset(**columns)` (which may return a text that joins the prompt), public methods that
are tools, and `get_reward()`. Two things may be added: an attribute `done`, which ends the episode, and `fork()`, which
returns an independent copy. Without `fork` a deep copy is made. Where that fails, or the class sets
`can_be_copied = False` (it holds a session elsewhere), an episode is played again from its start and every
observation is compared with the recorded one. One with `can_be_replayed = False` is branched at its start
alone. `take_messages(messages)` gets the whole conversation before `get_reward`.

One that answers whole turns has `respond(message)` in place of tools: it gets a sampled turn as a message (`content`,
`tool_calls`, each with an `id`, and in `num_tokens` the tokens before it and of it) and returns the messages that
follow. Its `reset` returns the messages of the prompt; `tools` are JSON schemas for the chat template.
"""

import asyncio
import copy
import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treewise.data.io.field_checks import shown
from treewise.data.render.messages import Message, clean_conversation
from treewise.errors import ConfigError, TaskError, TreewiseError
from treewise.rl.recorder.chat_tokens import ToolCall
from treewise.rl.tasks.calls import FailedCall, described
from treewise.rl.tasks.protocol import Split, TaskItem, check_held_out, rows_of_split
from treewise.rl.tasks.reward_functions import number

NOT_TOOLS = ("reset", "get_reward", "fork", "take_messages", "respond")
RESPOND = "respond"
StateMethod = Literal["fork", "deepcopy", "replay", "start"]


@dataclass(slots=True)
class EnvironmentTask:
    """A task of turns from an `environment_factory`.

    Parameters:
        factory: makes an environment.
        rows: columns for `reset`, with an optional `prompt`; one endless row with `seed` where None.
        prompt: of rows without one; what `reset` returns follows it.
        text_tool: a tool that gets the whole text of a turn, for models too small to write tool calls; observations
            then come as user messages.
        held_out: the share of rows, taken from the end, that is never practised.
    """

    factory: Callable[[], Any]
    name: str = "environment"
    rows: Sequence[Mapping[str, Any]] | None = None
    prompt: str = "Use the tools."
    max_turns: int = 8
    text_tool: str | None = None
    held_out: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.max_turns, int) or self.max_turns < 1:
            raise ConfigError(f"{self.name}: max_turns is {self.max_turns!r}; it must be an integer, at least 1.")
        check_held_out(self.name, self.held_out)
        rows: Any = self.rows
        is_listed = rows is None or (isinstance(rows, Sequence) and not isinstance(rows, str))
        if not is_listed or not all(isinstance(row, Mapping) for row in rows or ()):
            raise ConfigError(f"{self.name}: rows are {shown(rows)}; they must be a list of objects, of columns.")
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise ConfigError(f"{self.name}: the prompt is {shown(self.prompt)}; it must be a text that is not empty.")
        first = self._first()
        tools = tools_of(first)
        names = set(tools)
        if not names and not hasattr(first, "take_messages"):  # which scores an answer of one turn
            raise ConfigError(f"{self.name}: the environment has no public method to use as a tool.")
        if self.text_tool is not None and self.text_tool not in names:
            raise ConfigError(f"{self.name}: text_tool {self.text_tool!r} is not one of its tools {sorted(names)}.")
        if self.text_tool is not None and not inspect.signature(tools[self.text_tool]).parameters:
            raise ConfigError(f"{self.name}: text_tool {self.text_tool!r} has no parameter to take the text.")

    def num_items(self, split: Split) -> int | None:
        """Rows of a split; None without rows."""
        return None if self.rows is None else len(rows_of_split(len(self.rows), self.held_out, split))

    def item(self, split: Split, index: int) -> TaskItem:
        """See `TurnTask`. Without rows, `reset` gets `seed`: even for training, odd for held-out items."""
        if self.rows is None:
            columns: Mapping[str, Any] = {"seed": 2 * index + (split == "held_out")}
            key = f"{self.name}/{split}/{index}"
        else:
            rows = rows_of_split(len(self.rows), self.held_out, split)
            if not rows:
                raise ConfigError(f"{self.name}: no {split} rows of {len(self.rows)} with held_out={self.held_out}.")
            number = rows[index % len(rows)]
            columns, key = self.rows[number], f"{self.name}/row {number}"
        prompt = columns.get("prompt", self.prompt)
        if not isinstance(prompt, str):
            clean_conversation(list(prompt) if isinstance(prompt, tuple) else prompt, key, "prompt")
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        return TaskItem(key, messages, {k: v for k, v in columns.items() if k != "prompt"})

    @property
    def environment(self) -> Callable[[], Any]:
        """Makes an environment, which is not yet reset."""
        return self.factory

    def _first(self) -> object:
        try:
            return self.factory()
        except TreewiseError:
            raise
        except Exception as error:
            what = described(error, self.factory)
            raise ConfigError(f"{self.name}: the environment cannot be made: {what}") from error


def tools_of(environment: object) -> dict[str, Callable[..., Any]]:
    """Public methods by name, but those in `NOT_TOOLS`."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return {name: getattr(environment, name) for name, _ in members if name[0] != "_" and name not in NOT_TOOLS}


def answers_turns(environment: object) -> bool:
    """Whether it answers whole turns."""
    return callable(getattr(environment, RESPOND, None))


def tool_schemas(environment: Any, location: str) -> list[dict[str, Any]]:
    """JSON schemas for the chat template.

    Raises:
        ConfigError: a tool lacks type hints or a docstring in Google's style.
    """
    from transformers.utils import get_json_schema

    schemas: list[dict[str, Any]] = list(environment.tools) if answers_turns(environment) else []
    for name, tool in tools_of(environment).items():
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # transformers has several kinds for this
            raise ConfigError(f"{location}: tool {name!r} has no schema: {error}") from error
    return schemas


def opened(factory: Callable[[], Any], item: TaskItem) -> tuple[Any, Any]:
    """A new environment at the start of an episode, and what its `reset` returns: the text that joins the prompt, or
    the prompt's messages of one that answers whole turns. `reset` gets those of the item's columns that it takes.
    """
    environment = factory()
    columns = {"prompt": item.prompt if isinstance(item.prompt, str) else list(item.prompt), **item.extra}
    taken = inspect.signature(environment.reset).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        columns = {name: value for name, value in columns.items() if name in taken}
    result = awaited(environment.reset(**columns))
    if answers_turns(environment):
        messages = clean_conversation(result, item.key, "prompt").messages
        json.dumps(messages, ensure_ascii=False, default=str).encode()  # as `answer`
        return environment, messages
    if result is not None and not isinstance(result, str):
        raise TypeError(f"reset returned {type(result).__name__}; only text or None can join a prompt")
    str.encode(result or "")
    return environment, result


def opening(messages: Sequence[Message], first: str | list[Message] | None) -> list[Message]:
    """The messages of a prompt with the text that `reset` returned behind the last: on a line of its own, unless white
    space already stands between the two. Messages that it returned are the prompt.
    """
    if isinstance(first, list):
        return list(first)
    result = [dict(message) for message in messages]
    if first:
        content = result[-1].get("content") or ""
        if isinstance(content, str):
            is_apart = not content or content[-1].isspace() or first[0].isspace()
            result[-1]["content"] = content + ("" if is_apart else "\n") + first
        else:
            result[-1]["content"] = [*content, {"type": "text", "text": first}]
    return result


def carried_out(environment: object, call: ToolCall) -> tuple[str, object]:
    """The answer to a call, and the environment after it (a copy, where this runs in a worker process)."""
    return answer(environment, call), environment


def reward_of(environment: Any, messages: Sequence[Message]) -> float | FailedCall:
    """What `get_reward` returns: a float, or why it is none."""
    if hasattr(environment, "take_messages"):
        environment.take_messages(messages)
    return number(awaited(environment.get_reward()), "get_reward returned")


def answer(environment: Any, call: ToolCall) -> str:
    """The answer of the environment to one call; an error of a tool is returned as text, as in TRL. To a whole turn:
    the messages that follow, as JSON.

    Raises:
        UnicodeEncodeError: it is no text. TypeError: what answers a turn is no list of messages.
    """
    if answers_turns(environment):
        messages = awaited(environment.respond(dict(call.arguments)))
        if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
            raise TypeError(f"respond returned {shown(messages)}, not a list of messages with role and content")
        json.dumps(messages, ensure_ascii=False).encode()  # raises where a tokenizer would
        return json.dumps(messages)
    if call.problem is not None:
        return str({"error": call.problem})
    tool = tools_of(environment).get(call.name)
    if tool is None:
        return str({"error": f"Tool {call.name} not found."})
    try:
        text = str(awaited(tool(**call.arguments)))
    except Exception as error:  # a tool may raise anything, and the model reads it
        return str({"error": str(error)})
    str.encode(text)  # raises where a tokenizer would: a half of a surrogate pair is no character
    return text


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return value["role"] == "assistant" or isinstance(value.get("content"), str | list)


def awaited(result: object) -> object:
    """The value of a result, which may be a coroutine."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result


@dataclass(slots=True)
class TurnRecord:
    """What happened in one turn. snapshot: the environment before it, where one could be made."""

    calls: tuple[ToolCall, ...]
    answers: tuple[str, ...]
    snapshot: Any = field(default=None, repr=False)


def state_method(environment: object) -> StateMethod:
    """How the state of this environment can be brought back."""
    if callable(getattr(environment, "fork", None)):
        return "fork"
    if getattr(environment, "can_be_replayed", True) is False:
        return "start"
    if getattr(environment, "can_be_copied", True) is False:
        return "replay"
    try:
        copy.deepcopy(environment)
    except Exception:  # locks, sockets, generators: each raises its own kind
        return "replay"
    return "deepcopy"


def snapshot(environment: Any, method: StateMethod) -> object:
    """An independent copy; None where the method makes none."""
    if method == "fork":
        copied = environment.fork()
        if copied is None:
            raise TypeError("fork returned None")
        return copied
    return copy.deepcopy(environment) if method == "deepcopy" else None


def replayed(
    factory: Callable[[], Any], item: TaskItem, first: str | None, turns: Sequence[TurnRecord], episode: str
) -> object:
    """A new environment after the recorded turns.

    Parameters:
        first: what `reset` returned at first.

    Raises:
        TaskError: an observation differs from the recorded one; names task, episode and turn.
    """
    environment, text = opened(factory, item)
    if text != first:
        raise TaskError(
            f"{item.key}, episode {episode}: reset returns another text than before; it cannot be replayed."
        )
    for turn, record in enumerate(turns):
        for index, (call, expected) in enumerate(zip(record.calls, record.answers, strict=True)):
            if answer(environment, call) != expected:
                raise TaskError(
                    f"{item.key}, episode {episode}, turn {turn}: call {index} ({call.name}) returns another "
                    "result than before, so this branch cannot start there; give the environment a fork(), or let it "
                    "depend on its columns alone."
                )
    return environment


@dataclass
class GuessNumber:
    """Guess a number within a number of tries; each answer is higher, lower or correct. For tests and examples.

    The reward is 1 for the number at the first try and falls to 0 with the tries that were used up.
    """

    high: int = 16
    max_tries: int = 5
    secret: int = field(default=0, init=False)
    num_tries: int = field(default=0, init=False)
    is_correct: bool = field(default=False, init=False)

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.is_correct or self.num_tries >= self.max_tries

    def reset(self, seed: int = 0) -> str:
        """Draws a number from the seed."""
        self.secret = random.Random(seed).randint(1, self.high)
        self.num_tries, self.is_correct = 0, False
        return f" Guess a number from 1 to {self.high}."

    def guess(self, number: str) -> str:
        """Guesses the number.

        Args:
            number: The guess, a whole number.
        """
        self.num_tries += 1
        words = "".join(c if c.isdigit() else " " for c in str(number)).split()
        if not words:
            return "not a number"
        value = int(words[0])
        self.is_correct = value == self.secret
        if self.is_correct:
            return "correct"
        return "higher" if value < self.secret else "lower"

    def get_reward(self) -> float:
        """The share of tries that were left at the right guess; 0 without one."""
        return (self.max_tries - self.num_tries + 1) / self.max_tries if self.is_correct else 0.0

    def fork(self) -> "GuessNumber":
        """A copy that goes on from here by itself."""
        return copy.copy(self)
