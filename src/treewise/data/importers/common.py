"""What all importers share: the record that comes in, the rows that go out, and what was left out and why."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treewise.data.io.field_checks import shown
from treewise.data.io.forms import Record
from treewise.errors import DataError


@dataclass(slots=True)
class Context:
    """Settings of one import, and its findings.

    `reward_field` names the reward where a record holds several. `tokenizer` is there for dumps of text alone. `halves`
    are lines of batches that wait for their request or response, which may stand in another file.
    """

    reward_field: str | None = None
    tokenizer: Any = None
    left_out: list[tuple[str, str]] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    halves: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def leave_out(self, location: str, reason: str) -> None:
        """Counts something that is not imported."""
        self.left_out.append((location, reason))

    def warn(self, text: str) -> None:
        """Counts a finding; equal ones are shown once."""
        self.warnings[text] = self.warnings.get(text, 0) + 1

    def reward(self, value: object, location: str) -> float | None:
        """One number out of a reward: a number, or the named field of several.

        Raises:
            DataError: several rewards and no name, a name that is not there, or something that is no finite number.
        """
        if isinstance(value, dict):
            if self.reward_field is None:
                raise DataError(
                    f"{location}: several rewards ({', '.join(map(str, list(value)[:8]))}); name one with --reward."
                )
            if self.reward_field not in value:
                raise DataError(
                    f"{location}: no reward {self.reward_field!r} among {', '.join(map(str, list(value)[:8]))}."
                )
            value = value[self.reward_field]
        if value is None:
            return None
        if isinstance(value, bool):
            value = float(value)
        if not isinstance(value, int | float | np.number) or not math.isfinite(float(value)):
            raise DataError(f"{location}: a reward must be one finite number, found {shown(value)}.")
        return float(value)


def first_of(value: Record, *names: str) -> object:
    """The value of the first of some keys that a record has; None without any."""
    return next((value[name] for name in names if value.get(name) is not None), None)


def integers(value: object, name: str, location: str) -> list[int]:
    """A flat list of integers (token ids).

    Raises:
        DataError: anything else.
    """
    array = _array(value, name, location)
    if len(array) and array.dtype.kind not in "iu":
        raise DataError(f"{location}: {name} must be a flat list of integers, found {shown(value)}.")
    return [int(each) for each in array.tolist()]


def numbers(value: object, name: str, length: int, location: str) -> list[float]:
    """A flat list of `length` numbers; null counts as 0 (a writer's mark of a value that is not there).

    Raises:
        DataError: anything else, or another length.
    """
    if isinstance(value, list):
        value = [0.0 if each is None else each for each in value]
    array = _array(value, name, location)
    if len(array) and array.dtype.kind not in "iufb":
        raise DataError(f"{location}: {name} must be a flat list of numbers, found {shown(value)}.")
    if len(array) != length:
        raise DataError(f"{location}: {len(array)} {name} for {length} tokens; they must align.")
    return [float(each) for each in array.tolist()]


def messages(value: object, name: str, location: str) -> list[Record]:
    """A list of chat messages, not looked at closer than that.

    Raises:
        DataError: anything else.
    """
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise DataError(f"{location}: {name} must be a list of messages, found {shown(value)}.")
    return value


def token_row(
    context: Context,
    location: str,
    token_ids: Sequence[int],
    loss_weights: Sequence[float],
    **fields: object,
) -> Iterator[Record]:
    """The row, or nothing where no token of it is trained (which is counted). Fields of None are left away."""
    weights = [float(weight) for weight in loss_weights]
    if weights:
        weights[0] = 0.0  # nothing predicts a first token, and no trainer counts it
    if not any(weights):
        context.leave_out(location, "no sampled token to train on")
        return
    row: Record = {"token_ids": list(token_ids), "loss_weights": [_short(weight) for weight in weights]}
    row |= {name: value for name, value in fields.items() if value is not None}
    row["source"] = location
    yield row


def text_row(location: str, **fields: object) -> Record:
    """A record of text or messages: tokenised when it is loaded, which may give other ids than were sampled."""
    return {**{name: value for name, value in fields.items() if value is not None}, "source": location}


def prompt_at_step(prompt: object, step: object) -> str | None:
    """A group for the samples of one prompt in one step; None where no step is known."""
    if step is None:
        return None
    text = json.dumps(prompt, sort_keys=True, default=str)
    return f"step {step}: prompt-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def openai_tools(value: object, location: str) -> list[Record] | None:
    """Function schemas in OpenAI's shape, from that or from flat ones (`name`, `description`, `parameters`).

    Raises:
        DataError: something else.
    """
    if not value:
        return None
    tools = []
    for tool in messages(value, "tools", location):
        if "function" in tool or "name" not in tool:
            tools.append(tool)
        else:
            tools.append({"type": "function", "function": {k: v for k, v in tool.items() if v is not None}})
    return tools


def only_dicts(values: Iterable[Any], name: str, location: str) -> list[Record]:
    """A list of objects.

    Raises:
        DataError: something else among them.
    """
    items = list(values) if isinstance(values, list | tuple) else None
    if items is None or not all(isinstance(each, dict) for each in items):
        raise DataError(f"{location}: {name} must be a list of objects.")
    return items


def _array(value: object, name: str, location: str) -> np.ndarray:
    try:
        array = np.asarray([] if value is None else value)
    except (ValueError, OverflowError):
        array = np.zeros((0, 0))
    if array.ndim != 1:
        raise DataError(f"{location}: {name} must be a flat list, found {shown(value)}.")
    return array


def _short(weight: float) -> float | int:
    """Weights are almost always 0 and 1; whole numbers are written as such."""
    return int(weight) if weight.is_integer() else weight
