"""What is practised: tasks of one turn, and tasks of several turns with an environment.

A task makes *items*, each a prompt of chat messages that is a function of the split and an index alone, so training and
held-out items are disjoint and a resumed run practises what an undisturbed one would have. A single-turn task rewards a
completion's text; a task of turns makes an environment for an episode, which answers tool calls and rewards itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from treewise.data.render.messages import Message
from treewise.errors import ConfigError, DataError

Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One thing to practise. key: names it for good (`chain_sum/train/17`); prompt: chat messages, or a text that the
    model continues as it stands, without a chat template; extra: columns for reward functions.
    """

    key: str
    prompt: tuple[Message, ...] | str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """A finished rollout to reward: its item, the completion's text without special tokens, and token ids as sampled.

    message: the completion as the tokenizer's own response template reads it, where it has one.
    """

    item: TaskItem
    text: str
    token_ids: tuple[int, ...] = ()
    message: Mapping[str, Any] | None = None


class Items(Protocol):
    """What every task has."""

    name: str

    def num_items(self, split: Split) -> int | None:
        """How many there are; None where they never end."""
        ...

    def item(self, split: Split, index: int) -> TaskItem:
        """Item `index` of a split, the same at every call."""
        ...


@runtime_checkable
class SingleTurnTask(Items, Protocol):
    """A prompt and a reward of the completion."""

    def rewards(self, requests: Sequence[RewardRequest]) -> Sequence[float | None]:
        """A reward for each. May raise; `RewardRunner` keeps that from the loop."""
        ...


@runtime_checkable
class TurnTask(Items, Protocol):
    """A prompt and an environment that answers tool calls.

    text_tool: a tool that gets the whole text of a turn; None for tool calls.
    """

    max_turns: int
    text_tool: str | None

    @property
    def environment(self) -> Callable[[], Any]:
        """Makes an environment in the form of TRL's `environment_factory`: `reset`, public methods as tools, and
        `get_reward`; with `fork`, branches start from a copy that it makes itself. What worker processes are sent."""


Task = SingleTurnTask | TurnTask


def check_held_out(name: str, held_out: object) -> None:
    """Raises `ConfigError` where the share of rows that is never practised is none. name: of the task."""
    if not isinstance(held_out, int | float) or not 0.0 <= held_out < 1.0:
        raise ConfigError(f"{name}: held_out is {held_out!r}; it must be a number in [0, 1).")


def rows_of_split(num_rows: int, held_out: float, split: Split) -> range:
    """The numbers of a split's rows: the held-out ones are the last."""
    num_train = num_rows - round(num_rows * held_out)
    return range(num_train, num_rows) if split == "held_out" else range(num_train)


def row_of_split(name: str, num_rows: int, held_out: float, split: Split, index: int) -> int:
    """The number of the row that an item is; an index beyond a split's rows begins again. name: of the task.

    Raises:
        DataError: the split has no rows.
    """
    rows = rows_of_split(num_rows, held_out, split)
    if not rows:
        raise DataError(f"{name}: no {split} rows of {num_rows} with held_out={held_out}.")
    return rows[index % len(rows)]
