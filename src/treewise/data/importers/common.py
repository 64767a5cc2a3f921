"""What all importers share: the record that comes in, the rows that go out, and what was left out and why."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from treewise.base import features
from treewise.data.io.field_checks import shown
from treewise.data.io.files import Placed
from treewise.data.io.forms import Record
from treewise.data.io.replies import UnusableError
from treewise.errors import DataError
from treewise.tree.trajectory import STREAMS

MISSHAPEN = (LookupError, TypeError, AttributeError)  # of a record without the keys or lists that its format promises
OF_TOOLS = ("type", "cache_control", "strict", "defer_loading", "eager_input_streaming", "input_examples")
T = TypeVar("T")


@dataclass(slots=True)
class Context:
    """Settings of one import, and its findings.

    `reward_field` names the reward where a record holds several. `tokenizer` is there for dumps of text alone. `halves`
    are lines of batches that wait for their request or response, which may stand in another file. `known` are digests
    of what was read. `drop` takes a bad record and its error, where these do not stop the import.
    """

    reward_field: str | None = None
    tokenizer: Any = None
    left_out: list[tuple[str, str]] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    halves: dict[str, tuple[str, Any]] = field(default_factory=dict)
    known: set[bytes] = field(default_factory=set)
    drop: Callable[[Placed, str], None] | None = None

    def is_known(self, text: str) -> bool:
        """Whether this was asked of the same text before."""
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        is_new = digest not in self.known
        self.known.add(digest)
        return not is_new

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
            names = ", ".join(map(str, list(value)[:8]))
            if self.reward_field is None:
                raise DataError(f"{location}: several rewards ({names}); name one with --reward.")
            if self.reward_field not in value:
                raise DataError(f"{location}: no reward {self.reward_field!r} among {names}.")
            value = value[self.reward_field]
        if isinstance(value, float) and math.isnan(value):
            self.warn("rewards or advantages that are NaN count as none")
            return None
        if value is None:
            return None
        if not isinstance(value, int | float | np.number) or not math.isfinite(float(value)):
            raise DataError(f"{location}: a reward must be one finite number, found {shown(value)}.")
        return float(value)


def unjoined(context: Context) -> None:
    """Counts lines of a batch whose other half never came."""
    for key, (location, _) in context.halves.items():
        half, _, name = key.partition(" ")
        other = "output" if half == "request" else "input"
        context.leave_out(location, f"a batch {half} ({shown(name)}) of which the {other} file is not given")
    context.halves.clear()


def first_of(value: Record, *names: str) -> object:
    """The value of the first of some keys that a record has; None without any."""
    return next((value[name] for name in names if value.get(name) is not None), None)


def integers(value: object, name: str, location: str) -> list[int]:
    """A flat list of integers (token ids). Raises `DataError` for anything else."""
    return list(map(int, _flat(value, name, "integers", "iu", location)))


def numbers(value: object, name: str, length: int, location: str) -> list[float]:
    """A flat list of `length` finite numbers.

    Raises:
        UnusableError: one is null, or not finite: the row lacks what it must have.
        DataError: anything else, or another length.
    """
    found = stream(value, name, length, location)
    for index, each in enumerate(found):
        if math.isnan(each):
            raise UnusableError(f"{location}: {name}[{index}]", f"a token without its {name} (null, or not finite)")
    return found


def stream(value: object, name: str, length: int, location: str) -> list[float]:
    """As `numbers`, with NaN for what is null or not finite: `token_row` leaves out a row where that was sampled."""
    if isinstance(value, list):
        value = [math.nan if each is None else each for each in value]
    found = _flat(value, name, "numbers", "iufb", location)
    if len(found) != length:
        raise DataError(f"{location}: {len(found)} {name} for {length} tokens; they must align.")
    return [number if math.isfinite(number) else math.nan for number in map(float, found)]


def kept(context: Context, rows: Iterable[T], record: Placed | None = None) -> Iterator[T]:
    """Rows of a sample, which is left out and counted where it lacks what it must have.

    record: of which they are, and which is dropped where it is bad and `Context.drop` says how.
    """
    try:
        yield from rows
    except UnusableError as error:
        context.leave_out(error.location, error.reason)
    except (DataError, *MISSHAPEN) as error:
        if record is None or context.drop is None:
            raise
        text = str(error) if isinstance(error, DataError) else f"{record.location}: {misshapen(error)}"
        context.drop(record, text)


def misshapen(error: Exception) -> str:
    """The error of a record without the keys or lists that its format promises."""
    return f"does not have the shape that its format promises ({type(error).__name__}: {error})"


def _flat(value: object, name: str, what: str, kinds: str, location: str) -> list[Any]:
    try:
        array = np.asarray([] if value is None else value)
    except (ValueError, OverflowError):  # ragged
        array = np.zeros((0, 0))
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        raise DataError(f"{location}: {name} must be a flat list of {what}, found {shown(value)}.")
    return array.tolist()


def objects(value: object, name: str, location: str, what: str = "objects") -> list[Record]:
    """A list of objects, not looked at closer than that. Raises `DataError` for another. what: they are, in words."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise DataError(f"{location}: {name} must be a list of {what}, found {shown(value)}.")
    return value


messages = partial(objects, what="messages")


def token_row(
    context: Context,
    location: str,
    token_ids: Sequence[int],
    loss_weights: Sequence[float],
    **fields: object,
) -> Iterator[Record]:
    """The row, or nothing where no token of it is trained or one lacks a value of a stream (which is counted). Fields
    of None, and streams that hold no sampled token's value, are left away.
    """
    weights = [float(weight) for weight in loss_weights]
    if weights:
        weights[0] = 0.0  # nothing predicts a first token, and no trainer counts it
    sampled = [index for index, weight in enumerate(weights) if weight]
    if not sampled:
        context.leave_out(location, "no sampled token to train on")
        return
    for name, values in fields.items():
        if name not in STREAMS or not isinstance(values, list):
            continue  # an advantage may be one number
        missing = [index for index in sampled if math.isnan(values[index])]
        if len(missing) == len(sampled):
            context.warn(f"rows whose {name} are all null are read as rows without them")
            fields[name] = None
        elif missing:
            context.leave_out(f"{location}: token {missing[0]}", f"a sampled token without its {name}")
            return
        else:
            fields[name] = [0.0 if math.isnan(value) else value for value in values]
    short = [int(weight) if weight.is_integer() else weight for weight in weights]  # almost all are 0 and 1
    yield text_row(location, token_ids=list(token_ids), loss_weights=short, **fields)


def sampled_row(
    context: Context,
    location: str,
    prompt: Sequence[int],
    sampled: Sequence[int],
    mask: object = None,
    streams: Mapping[str, tuple[str, object]] | None = None,
    **fields: object,
) -> Iterator[Record]:
    """`token_row` of a prompt and what was sampled after it. mask: what of it is trained; None: all. streams: of what
    was sampled, by our names, each with its name in the dump; those of None are left away.
    """
    length, before = len(sampled), [0.0] * len(prompt)
    weights = [1.0] * length if mask is None else numbers(mask, "the mask of the sampled tokens", length, location)
    given = {ours: each for ours, each in (streams or {}).items() if each[1] is not None}
    own = {ours: before + stream(values, theirs, length, location) for ours, (theirs, values) in given.items()}
    yield from token_row(context, location, [*prompt, *sampled], before + weights, **own, **fields)


def experts(value: object, name: str, num_tokens: int, location: str) -> np.ndarray | None:
    """[num_tokens, L, k] int64, the experts of a dump; -1 for rows of nothing but zeros, by which verl and prime-rl
    fill up, and for the last where there is none. None: the dump has none.

    Raises:
        DataError: another number of rows, or no table a token.
    """
    if value is None:
        return None
    given = features.encoded_arrays.decoded(value, name, location, num_tokens)
    try:
        table = np.asarray(given)
    except (ValueError, OverflowError):  # ragged
        table = np.zeros(0)
    if table.ndim != 3 or len(table) not in (num_tokens, num_tokens - 1) or table.dtype.kind not in "iu":
        raise DataError(f"{location}: {name} has shape {table.shape}; [{num_tokens}, layers, experts] is expected.")
    whole = np.full((num_tokens, *table.shape[1:]), -1, dtype=np.int64)
    is_filled = (table == 0).all((1, 2)) & (table.shape[2] > 1)
    whole[: len(table)] = np.where(is_filled[:, None, None], -1, table)
    return whole


def text_row(location: str, **fields: object) -> Record:
    """A record of text or messages: tokenised when it is loaded, which may give other ids than were sampled."""
    return {**{name: value for name, value in fields.items() if value is not None}, "source": location}


def prompt_at_step(prompt: object, step: object) -> str | None:
    """A group for the samples of one prompt in one step; None where no step is known."""
    if step is None:
        return None
    text = json.dumps(prompt, sort_keys=True, default=str)
    return f"step {step}: prompt-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def talk_of(request: Record) -> Any:
    """The messages of a request, behind the system prompt that Anthropic's has beside them."""
    talk, system = request["messages"], request.get("system")
    return [{"role": "system", "content": system}, *talk] if system and isinstance(talk, list) else talk


def tools_of(request: Record) -> Any:
    """The tools of a request, which OpenAI called `functions` before."""
    return request.get("tools") or request.get("functions")


def openai_tools(value: object, location: str, context: Context) -> list[Record] | None:
    """Function schemas in OpenAI's shape, from that or from flat ones (`name`, `description`, and `parameters`, which
    Anthropic calls `input_schema`). Tools of other types, which providers run and describe to their models, are
    counted.
    """
    found = []
    for tool in messages(value or [], "tools", location):
        kind = tool.get("type", "function")
        if kind == "function" or (kind == "custom" and "input_schema" in tool):
            is_flat = "function" not in tool and "name" in tool
            found.append({"type": "function", "function": _function(tool)} if is_flat else tool)
        else:
            context.warn(f"tools of type {shown(kind)}, which are not read")
    return found or None


def _function(tool: Record) -> Record:
    """A flat schema without what belongs to its tool, or tells a provider how to take calls of it."""
    names = {"input_schema": "parameters"}
    return {names.get(k, k): v for k, v in tool.items() if v is not None and k not in OF_TOOLS}
