"""Times of logs in one unit, whatever wrote them, and the order of calls by them."""

from datetime import UTC, date, datetime, timedelta, timezone

import numpy as np
import pytest

from treewise.data.importers.common import Context
from treewise.data.importers.times import common_clock, log_order, moment, times_of

NOON = 1_767_268_800 * 10**9  # 2026-01-01 12:00 UTC, in nanoseconds


@pytest.mark.parametrize(
    ("value", "after"),
    [
        ("2026-01-01T12:00:00Z", 0),
        ("2026-01-01T12:00:00.500Z", 500_000_000),
        ("2026-01-01T12:00:00.123456789Z", 123_456_789),
        ("2026-01-01T12:00:00.1234567891Z", 123_456_789),
        ("2026-01-01 12:00:00,25", 250_000_000),
        ("2026-01-01T12:00:00", 0),
        ("2026-01-01T14:00:00.5+02:00", 500_000_000),
        ("2026-01-01T06:30:00-0530", 0),
        ("2026-01-01 12:00:00 UTC", 0),
        ("20260101T120000Z", 0),
        ("Thu, 01 Jan 2026 12:00:00 GMT", 0),
        (1_767_268_800, 0),
        (1_767_268_800.25, 250_000_000),
        (1_767_268_800_001, 1_000_000),
        (1_767_268_800_000_001, 1_000),
        (1_767_268_800_000_000_001, 1),
        ("1767268800.25", 250_000_000),
        ("1767268800000", 0),
        (np.float64(1_767_268_800), 0),
        (np.int64(1_767_268_800_000), 0),
        (datetime(2026, 1, 1, 12, tzinfo=UTC), 0),
        (datetime(2026, 1, 1, 12), 0),
        (datetime(2026, 1, 1, 7, tzinfo=timezone(timedelta(hours=-5))), 0),
        (np.datetime64("2026-01-01T12:00:00.000000001"), 1),
    ],
)
def test_a_time_is_read_to_the_nanosecond(value, after):
    assert moment(value) == NOON + after


@pytest.mark.parametrize("value", [None, "", "soon", True, float("nan"), float("inf"), 1.25, "0.3", 10**30, [], {}])
def test_what_is_no_time_is_none(value):
    assert moment(value) is None


def test_a_day_is_its_beginning():
    assert moment(date(2026, 1, 1)) == moment("2026-01-01") == NOON - 12 * 3600 * 10**9


def test_times_that_cannot_be_read_are_counted_and_the_first_holder_counts():
    context = Context()
    found = times_of(context, {"timestamp": "soon", "created": 1_767_268_800}, None, {"created": 1}, {"ts": 1.5})
    assert found == {"created": NOON}
    assert context.warnings == {"calls whose timestamp is no time that can be read": 1}


def test_a_clock_is_one_that_all_calls_have():
    assert common_clock([{"timestamp": 1, "created": 5}, {"created": 4}]) == [5, 4]
    assert common_clock([{"timestamp": 1}, {"created": 4}]) is None
    assert common_clock([{"startTime": 2, "created": 1}, {"startTime": 1, "created": 2}]) == [2, 1]


@pytest.mark.parametrize(
    ("times", "sizes", "before", "order"),
    [
        ([3, 1, 2], [1, 1, 1], [[], [], []], [1, 2, 0]),
        ([1, 1, 1], [1, 3, 5], [[], [0], [1]], [0, 1, 2]),
        ([1, 1, 1], [5, 3, 1], [[1], [2], []], [2, 1, 0]),  # one tick, newest first
        ([2, 2, 1, 1], [1, 1, 1, 1], [[]] * 4, [3, 2, 1, 0]),  # ticks in a log that is newest first
        (None, [1, 3, 1], [[], [0], []], [0, 1, 2]),
        (None, [3, 1, 5], [[1], [], [0]], [1, 0, 2]),  # in no order
        (None, [5, 3, 2], [[1], [2], []], [2, 1, 0]),
        (None, [3, 5, 1], [[], [], []], [0, 1, 2]),  # nothing contradicts the log
        ([1, 2, 3], [3, 1, 1], [[1], [], []], [1, 2, 0]),  # clocks that contradict what was said
    ],
)
def test_calls_are_in_the_order_in_which_they_were_made(times, sizes, before, order):
    assert log_order(times, sizes, before) == order
