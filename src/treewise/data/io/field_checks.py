"""Single values and flat lists of records, checked where they come in."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from treewise.data.io.printable import shown
from treewise.errors import DataError
from treewise.tree import checks
from treewise.tree.checks import MAX_FLOAT
from treewise.tree.trajectory import STREAMS

# Names of the same thing elsewhere. Ignored, they would change what is trained.
OTHER_NAMES = {
    **{other: name for name, stream in STREAMS.items() for other in stream.other_names},
    "rewards": "reward",
    "rollout_id": "rollout",
}


def label(value: Any, name: str, location: str) -> Any:
    """Text or a number that names something (a group, a rollout); None where it is absent."""
    if value is not None and (not isinstance(value, str | int | float) or value != value):
        raise DataError(f"{location}: {name} must be text or a number, found {type(value).__name__}.")
    return value


def number(value: Any, name: str, location: str) -> float | None:
    """One finite number; None where it is absent."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_FLOAT:
        raise DataError(f"{location}: {name} must be one finite number, found {shown(value)}.")
    return float(value)


def flat_list(value: Any, name: str, location: str) -> Any:
    """A list, or the 1-D array of a column; its items are not looked at."""
    if not isinstance(value, list | np.ndarray) or (isinstance(value, np.ndarray) and value.ndim != 1):
        raise DataError(f"{location}: {name} must be a flat list of numbers, found {shown(value)}.")
    return value


def number_list(value: Any, name: str, location: str) -> np.ndarray:
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


def check_names(record: Mapping[str, Any], location: str) -> None:
    """Checks that no stream beside token ids has a name that treewise would ignore.

    Raises:
        DataError: with the name that it should have.
    """
    for name, ours in OTHER_NAMES.items():
        if name in record and ours not in record:
            raise DataError(
                f"{location}: {name} is not a key here; write it as {ours}, or let `treewise import` read the dump."
            )
