"""When calls were made: times of logs in one unit, and the order of calls by them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from email.utils import parsedate_to_datetime
from itertools import pairwise

import numpy as np

from treewise.data.importers.common import Context

SECOND = 10**9  # in nanoseconds, the unit of all times here
LEAST = 10**8  # seconds, in 1973: what is less is how long something took, or a clock of its own
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The usual names of when a call began, or was logged: the first that all calls of a run have orders them.
CLOCKS = (
    *("start_time", "startTime", "started_at", "startedAt", "request_time", "requestTime", "requested_at"),
    *("timestamp", "timestamp_ms", "@timestamp", "ts", "time", "datetime", "date", "logged_at", "created_at"),
    *("createdAt", "created", "start_time_unix_nano", "startTimeUnixNano", "end_time", "endTime", "completed_at"),
)
_FRACTION = re.compile(r"(?P<whole>.*:\d\d)[.,](?P<digits>\d+)(?P<zone>.*)", re.DOTALL)


def moment(value: object) -> int | None:
    """A time in nanoseconds since 1970, from ISO 8601 with any fraction and zone (UTC where it has none), the dates of
    HTTP, and numbers in seconds, milliseconds, microseconds or nanoseconds; None where it is none of these.
    """
    if isinstance(value, np.datetime64):
        return None if np.isnat(value) else int(value.astype("datetime64[ns]").astype(np.int64))
    if isinstance(value, datetime):
        return _of_datetime(value)
    if isinstance(value, date):
        return _of_datetime(datetime(value.year, value.month, value.day))
    if isinstance(value, str):
        return _of_text(value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
        return None
    return _of_number(Decimal(int(value)) if isinstance(value, int | np.integer) else Decimal(repr(float(value))))


def _of_number(value: Decimal) -> int | None:
    """Of a number, whose size says its unit: seconds have 10 digits since 2001, each finer unit three more."""
    size = abs(value)
    if not LEAST <= size < 10**20:  # the year 5138 in nanoseconds
        return None
    unit = next(unit for unit in range(4) if size < 10 ** (11 + 3 * unit) or unit == 3)
    return int((value * SECOND) / 1000**unit)


def _of_text(text: str) -> int | None:
    try:
        return _of_number(Decimal(text))
    except (InvalidOperation, OverflowError, ValueError):
        pass
    match = _FRACTION.fullmatch(text)
    digits = match["digits"] if match else ""
    whole = match["whole"] + match["zone"] if match else text
    for suffix in (" UTC", " GMT", "UTC", " Z"):
        whole = whole.removesuffix(suffix) + "Z" if whole.endswith(suffix) and whole[:4].isdecimal() else whole
    try:
        found = _of_datetime(datetime.fromisoformat(whole))
    except ValueError:
        try:
            found = _of_datetime(parsedate_to_datetime(text))
        except (ValueError, TypeError, IndexError):
            return None
    return found + int(digits[:9].ljust(9, "0")) if digits else found


def _of_datetime(value: datetime) -> int:
    since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - EPOCH
    return (since.days * 86_400 + since.seconds) * SECOND + since.microseconds * 1000


def times_of(context: Context, *holders: object) -> dict[str, int]:
    """The times that a record and what belongs to it give, by their names in `CLOCKS`; the first holder counts."""
    found: dict[str, int] = {}
    for holder in holders:
        if not isinstance(holder, dict):
            continue
        for name in CLOCKS:
            value = holder.get(name)
            time = None if name in found else moment(value)
            if time is not None:
                found[name] = time
            elif isinstance(value, str) and value and name not in found:
                context.warn(f"calls whose {name} is no time that can be read")
    return found


def common_clock(times: Sequence[Mapping[str, int]]) -> list[int] | None:
    """The time of each call by the first clock that all of them have; None where they have none in common."""
    name = next((name for name in CLOCKS if all(name in each for each in times)), None)
    return None if name is None else [each[name] for each in times]


def log_order(times: Sequence[int] | None, sizes: Sequence[int], before: Sequence[Sequence[int]]) -> list[int]:
    """The indices of calls in the order in which they were made.

    Parameters:
        times: of each; None: not known.
        sizes: messages that each call has.
        before: for each call, those of which one came before it, because it goes on from them.
    """
    clock = times or [0] * len(sizes)
    falls = sum(one > other for one, other in pairwise(clock))
    rises = sum(one < other for one, other in pairwise(clock))
    if falls == rises == 0:
        firsts = _firsts(before, range(len(sizes)))
        falls = sum(first > index for index, first in firsts.items())
        rises = len(firsts) - falls
    sign = -1 if falls > rises else 1  # a log that begins with the newest
    orders: Sequence[Callable[[int], tuple[int, ...]]] = (
        lambda index: (clock[index], sign * index),
        lambda index: (clock[index], sizes[index], sign * index),  # within a tick, what holds more came later
        lambda index: (sizes[index], clock[index], sign * index),
    )
    order: list[int] = []
    for key in orders:
        order = sorted(range(len(sizes)), key=key)
        place = {index: number for number, index in enumerate(order)}
        if all(first < place[index] for index, first in _firsts(before, place).items()):
            break
    return order


def _firsts(before: Sequence[Sequence[int]], place: Mapping[int, int] | Sequence[int]) -> dict[int, int]:
    """The first place of the calls before each; calls that go on from the same ones share one list of them."""
    known: dict[int, int] = {}
    found = {}
    for index, calls in enumerate(before):
        if calls:
            if id(calls) not in known:
                known[id(calls)] = min(place[call] for call in calls)
            found[index] = known[id(calls)]
    return found
