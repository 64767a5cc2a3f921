"""Single values and flat lists of records: checked where they come in, and shown in messages escaped and short, so that
content can never forge a message or flood a terminal.
"""

import math
import re
from typing import Any

import numpy as np

from treewise.errors import DataError
from treewise.tree import checks
from treewise.tree.checks import MAX_FLOAT


def label(value: object, name: str, location: str) -> str | int | float | None:
    """Text or a number that names something (a group, a rollout); None where it is absent."""
    if value == "":
        raise DataError(f"{location}: {name} is empty; leave it out, or name it.")
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int | float) or value != value):
        raise DataError(f"{location}: {name} must be text or a number, found {shown(value)}.")
    return whole(value)


def whole(value: str | int | float | None) -> str | int | float | None:
    """A whole number as an integer: a column of floats, which Parquet and pandas make where some rows have none, holds
    the name 1 as 1.0.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def number(value: object, name: str, location: str) -> float | None:
    """One finite number; None where it is absent."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_FLOAT:
        raise DataError(f"{location}: {name} must be one finite number, found {shown(value)}.")
    return float(value)


def flat_list(value: object, name: str, location: str) -> list[Any] | np.ndarray:
    """A list, or the 1-D array of a column; its items are not looked at."""
    if not isinstance(value, list | np.ndarray) or (isinstance(value, np.ndarray) and value.ndim != 1):
        raise DataError(f"{location}: {name} must be a flat list of numbers, found {shown(value)}.")
    return value


def number_list(value: object, name: str, location: str) -> np.ndarray:
    """A flat list of finite numbers, as float32."""
    items = flat_list(value, name, location)
    return checks.numbers(items, name, len(items), location)


def weight(value: Any, location: str) -> float:
    """The loss weight of a message: 1 where it is absent."""
    if value is None:
        return 1.0
    good = not isinstance(value, bool) and isinstance(value, int | float) and not math.isnan(value)
    if not good or not 0 <= value <= MAX_FLOAT:
        raise DataError(f"{location}: weight {shown(value)} must be a finite number of at least 0 (0: not trained).")
    return float(value)


# -- in messages ------------------------------------------------------------------------------------------------------

MAX_SHOWN = 60
# Control characters (line ends, too), marks that reverse the direction of text, and halves of surrogate pairs.
_RAW = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """A printable one-line excerpt of any value: control characters escaped, at most about `limit` characters."""
    if isinstance(value, str | bytes) and len(value) > limit:
        return ascii(value[:limit]) + "..."
    try:
        text = re.sub(r"\s*\n\s*", " ", ascii(value))  # arrays are written in several lines
    except ValueError:  # Python writes no integer of over 4,300 digits
        text = f"an integer of {value.bit_length():,} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= limit + 2 else text[:limit] + "..."


def printable(text: object) -> str:
    """Text of any length with its control characters escaped: names and paths that a terminal may show as they are."""
    return _RAW.sub(lambda match: ascii(match.group())[1:-1], str(text))


def json_kind(value: object) -> str:
    """What a value that is no object is called in JSON, for messages."""
    if isinstance(value, list):
        return "a list; records are one a line, or in a .json file that holds one list"
    return "null" if value is None else "text" if isinstance(value, str) else f"{value!r:.40}"
