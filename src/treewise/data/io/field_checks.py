"""Single values and flat lists of records, checked where they come in."""

import math
from typing import Any

import numpy as np

from treewise.data.io.printable import shown
from treewise.errors import DataError
from treewise.tree import checks
from treewise.tree.checks import MAX_FLOAT


def label(value: object, name: str, location: str) -> str | int | float | None:
    """Text or a number that names something (a group, a rollout); None where it is absent."""
    if value is not None and (not isinstance(value, str | int | float) or value != value):
        raise DataError(f"{location}: {name} must be text or a number, found {type(value).__name__}.")
    return value


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
