"""Rows that hold several samples one after another, as packing trainers store them, cut into a row for each.

Lengths beside the ids (TRL's `seq_lengths`), their cumulative sums, an `attention_mask` that numbers the samples
(axolotl, LLaMA-Factory), or `position_ids` that begin again. Trained as one row, the samples would see each other.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from treewise.base import features
from treewise.data.io.field_checks import flat_list, shown
from treewise.data.io.forms import CUMULATIVE, LENGTHS, PACKING, Record
from treewise.data.readers.token_rows import PER_TOKEN, with_mask
from treewise.errors import DataError
from treewise.tree import checks
from treewise.tree.trajectory import STREAMS

Bounds = list[tuple[int, int]]  # [start, end) of each sample


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a packed row, each with its location, and how many hold no trained token and are left out: in the
    packed row nothing of them is trained either.
    """

    records: list[tuple[str, Record]]
    num_untrained: int


def samples_of(record: Record, location: str) -> Samples | None:
    """The samples of a packed row of token ids; None for a row of one sample.

    Raises:
        DataError: lengths that do not add up to the ids, signs that contradict each other, values per token of another
            length, or no sample with a trained token.
    """
    name = next((name for name in ("input_ids", "token_ids") if name in record), None)
    signs = [sign for sign in PACKING if isinstance(record.get(sign), list | np.ndarray)]
    if name is None or not signs:
        return None
    ids = flat_list(record[name], name, location)
    bounds = _bounds(record, signs, name, len(ids), location)
    if bounds is None:
        return None
    if record.get("rollout") is not None or record.get("images") is not None:
        raise DataError(
            f"{location}: {len(bounds)} samples in one row with a rollout or images; give each its own row."
        )
    if "routed_experts" in record:
        record = {
            **record,
            "routed_experts": features.encoded_arrays.decoded(record["routed_experts"], "routed_experts", location),
        }
    of_token = [key for key in record if key in (name, "loss_weights", *PER_TOKEN, *STREAMS)]
    of_token = [key for key in of_token if isinstance(record[key], list | np.ndarray)]
    for key in of_token:
        if len(record[key]) != len(ids):
            raise DataError(f"{location}: {len(record[key])} {key} for {len(ids)} {name}; they must align.")
    rest = {key: value for key, value in record.items() if key not in (*of_token, *PACKING)}
    samples = []
    for number, (low, high) in enumerate(bounds):
        where = location if len(bounds) == 1 else f"{location}#{number}"
        own = {key: record[key][low:high] for key in of_token}
        if "attention_mask" in own:
            own["attention_mask"] = (np.asarray(own["attention_mask"]) != 0).astype(np.int64)
        sample = with_mask({**rest, **own, "token_ids": own.pop(name)}, where, name)
        if len(sample["token_ids"]) > 1 and np.any(np.asarray(sample["loss_weights"]) != 0):
            samples.append((where, sample))
    if not samples:
        raise DataError(f"{location}: none of the {len(bounds)} samples of this row has a trained token.")
    return Samples(samples, len(bounds) - len(samples))


def _bounds(record: Record, signs: list[str], name: str, num_ids: int, location: str) -> Bounds | None:
    """The samples by every sign that there is, without padding at the ends of the row; None where none says any."""
    mask = np.ones(num_ids)
    if "attention_mask" in signs:
        mask = checks.as_array(record["attention_mask"], "attention_mask", location)
    seen = np.flatnonzero(mask) if mask.ndim == 1 else np.zeros(0)
    start, end = (int(seen[0]), int(seen[-1]) + 1) if len(seen) and len(mask) == num_ids else (0, num_ids)
    found: dict[str, Bounds] = {}
    for sign in signs:
        values = checks.as_array(record[sign], sign, location)
        if values.ndim != 1 or not len(values) or values.dtype.kind not in "iub":
            if sign in (*LENGTHS, *CUMULATIVE):
                raise DataError(f"{location}: {sign} must be a flat list of integers, found {shown(record[sign])}.")
            continue  # positions on several axes; `with_mask` says what is wrong with others
        values, where = values.astype(np.int64), f"{location}: {sign}"
        if sign in (*LENGTHS, *CUMULATIVE):
            found[sign] = _by_length(values, sign in CUMULATIVE, name, (num_ids, start, end), where)
        elif len(values) != num_ids:
            continue
        elif sign == "position_ids":
            found[sign] = _by_position(values[start:end], start, where)
        else:
            found[sign] = _by_number(values, None if sign == "seq_idx" else 0, where)
    cut = {
        sign: [(max(low, start), min(high, end)) for low, high in each if max(low, start) < min(high, end)]
        for sign, each in found.items()
        if len(each) > 1 or sign in (*LENGTHS, *CUMULATIVE)
    }
    for sign, each in cut.items():
        other = next(iter(cut))
        if each != cut[other]:
            raise DataError(
                f"{location}: {other} cuts the row into samples of {_shown(cut[other])} tokens, {sign} into "
                f"{_shown(each)}."
            )
    return next(iter(cut.values()), None)


def _by_length(values: np.ndarray, is_sum: bool, name: str, size: tuple[int, int, int], where: str) -> Bounds:
    num_ids, start, end = size
    if is_sum and values[0] != 0:
        raise DataError(f"{where} begins with {values[0]}; sums of lengths begin with 0.")
    edges = values if is_sum else np.concatenate([[0], np.cumsum(values)])
    if (np.diff(edges) < 0).any():
        raise DataError(f"{where} holds a negative length: {shown(values.tolist())}.")
    if edges[-1] not in (num_ids, end - start):
        raise DataError(
            f"{where} adds up to {edges[-1]} tokens, and the row has {num_ids} {name}; each token is of one sample."
        )
    edges = edges + (0 if edges[-1] == num_ids else start)
    return [(int(low), int(high)) for low, high in pairwise(edges) if low < high]


def _by_number(values: np.ndarray, padding: int | None, where: str) -> Bounds:
    starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
    runs = [(int(low), int(high)) for low, high in zip(starts, [*starts[1:], len(values)], strict=True)]
    runs = [(low, high) for low, high in runs if values[low] != padding]
    numbers = [int(values[low]) for low, _ in runs]
    if not numbers or (padding is not None and max(numbers) <= 1):
        return []  # a mask of 0 and 1
    again = next((number for number, count in Counter(numbers).items() if count > 1), None)
    if again is not None:
        raise DataError(f"{where} holds sample {again} in two places; a sample of a packed row is in one.")
    return runs


def _by_position(values: np.ndarray, offset: int, where: str) -> Bounds:
    starts = np.flatnonzero(np.diff(values, prepend=values[0]) != 1)
    wrong = next((int(at) for at in starts if values[at] != values[0]), None)
    if wrong is not None:
        raise DataError(
            f"{where}[{offset + wrong}] is {values[wrong]} behind {values[wrong - 1]}: neither 1 more, nor "
            f"{values[0]}, where a sample of a packed row begins."
        )
    ends = [*starts[1:], len(values)]
    return [(offset + int(low), offset + int(high)) for low, high in zip(starts, ends, strict=True)]


def _shown(bounds: Bounds) -> str:
    return shown([high - low for low, high in bounds])
