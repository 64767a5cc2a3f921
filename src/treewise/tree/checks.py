"""Checks of token ids, loss weights and streams: one rule and one wording for trajectories, nodes and data files.

Every message begins with `location`, where the values came from: a record (`rollouts.jsonl:17`), a node, a trajectory.
"""

import math
import reprlib
from collections.abc import Sequence
from types import UnionType

import numpy as np
from numpy.typing import ArrayLike

from treewise.errors import DataError

MAX_TOKEN_ID = np.iinfo(np.int32).max
MAX_SHOWN_BITS = 128  # of an integer in a message; Python writes no integer of over 4,300 digits
MAX_WHOLE = 2**24  # up to which float32 holds every whole number
MAX_FLOAT = float(np.finfo(np.float32).max)  # streams are float32


def as_array(values: object, name: str, location: str) -> np.ndarray:
    """Values of any shape and type as an array. Raises `DataError` for ragged lists."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError):  # NumPy's words are about array elements
        found = _first_wrong(values, float | int | np.number)
        raise DataError(f"{location}: {name} is not a flat sequence of numbers, found {found}.") from None


def checked_ids(values: object, location: str, if_empty: str = "a trajectory needs at least two tokens") -> np.ndarray:
    """[n] int32, at least one token id; `if_empty` is the advice for none at all.

    Raises:
        DataError: values that are not flat, not integers, or outside 0..2^31 - 1.
    """
    ids = as_array(values, "token_ids", location)
    if ids.ndim != 1:
        raise DataError(f"{location}: token_ids has {ids.ndim} dimensions; give one flat sequence of integers.")
    if len(ids) == 0:
        raise DataError(f"{location}: token_ids is empty; {if_empty}.")
    # NumPy reads a bool among integers as an integer, so the types within a list are checked, too.
    types = set(map(type, values)) if isinstance(values, list | tuple) else set()
    if types == {int} and ids.dtype.kind not in "iu":  # NumPy has no type for 2^63 beside a negative number
        ids = np.asarray(values, dtype=object)
    elif ids.dtype.kind not in "iu" or bool in types:
        raise DataError(f"{location}: token_ids must be integers, found {_first_wrong(values, int | np.integer)}.")
    bad = np.flatnonzero((ids < 0) | (ids > MAX_TOKEN_ID))
    if len(bad):
        wrong = int(ids[bad[0]])
        text = wrong if wrong.bit_length() <= MAX_SHOWN_BITS else f"of {wrong.bit_length():,} bits"
        raise DataError(f"{location}: token id {text} at position {bad[0]} is outside 0..{MAX_TOKEN_ID}.")
    return np.ascontiguousarray(ids, dtype=np.int32)


def numbers(values: ArrayLike, name: str, length: int, location: str, *, is_scalar_allowed: bool = False) -> np.ndarray:
    """[length] float32, one finite number per token; a scalar is repeated for all tokens where it is allowed.

    Raises:
        DataError: another length, something that is not a number, or a value that is not finite as float32.
    """
    array = as_array(values, name, location)
    if is_scalar_allowed and array.ndim == 0:
        array = np.full(length, array)
    if array.ndim != 1 or len(array) != length:
        size = len(array) if array.ndim == 1 else f"shape {array.shape}"
        raise DataError(f"{location}: {size} {name} for {length} tokens; they must align with token_ids.")
    if array.dtype.kind == "O" and set(map(type, array.tolist())) <= {int, float}:  # an integer of over 64 bits
        array = np.array([float(x) if abs(x) <= MAX_FLOAT else math.inf * (1 if x > 0 else -1) for x in array.tolist()])
    if array.dtype.kind not in "fiub":
        raise DataError(f"{location}: {name} must be numbers, found {_first_wrong(values, float | int | np.number)}.")
    return finite(array, name, location)


def whole_numbers(values: np.ndarray, name: str, location: str) -> None:
    """Raises `DataError` for [n] float32 numbers that are not whole, or too large for float32 to distinguish."""
    bad = np.flatnonzero((values != np.round(values)) | (np.abs(values) >= MAX_WHOLE))
    if len(bad):
        wrong = f"{name}[{bad[0]}] is {values[bad[0]]:g}"
        raise DataError(f"{location}: {wrong}; every value must be a whole number below {MAX_WHOLE:,}.")


def finite(array: np.ndarray, name: str, location: str) -> np.ndarray:
    """The numbers as float32. Raises `DataError` with the first position that is not finite as float32."""
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(array, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        index = bad[0]
        raise DataError(f"{location}: {name}[{index}] is {array[index]}; every value must be finite (and fit float32).")
    return values


def loss_weights(weights: np.ndarray, location: str, *, begins: bool = True) -> None:
    """Checks [n] loss weights. `begins`: their first token is the first of a trajectory.

    Raises:
        DataError: a weight on a first token, or a negative one.
    """
    if begins and weights[0] != 0:
        raise DataError(
            f"{location}: loss_weights[0] is {weights[0]:g}, but nothing predicts a first token; set it to 0."
        )
    bad = np.flatnonzero(weights < 0)
    if len(bad):
        raise DataError(
            f"{location}: loss weight {weights[bad[0]]:g} at position {bad[0]} is negative; advantages carry the sign."
        )


def finite_number(value: object, name: str, location: str) -> float:
    """One number that is finite as float32. Raises `DataError`."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        found = f"{reprlib.repr(value)}; leave out quotes and units" if isinstance(value, str) else type(value).__name__
        raise DataError(f"{location}: {name} must be a number, found {found}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_FLOAT:
        limit = f" as float32 (up to {MAX_FLOAT:.1e})" if math.isfinite(number) else ""
        raise DataError(f"{location}: {name} is {number}; it must be finite{limit}.")
    return number


def _first_wrong(values: object, right: type | UnionType) -> str:
    """The first element of a wrong type, which is clearer than NumPy's common type."""
    if isinstance(values, Sequence) and not isinstance(values, str):
        for position, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, right):
                return f"{type(value).__name__} at position {position}"
    return str(np.asarray(values).dtype)
