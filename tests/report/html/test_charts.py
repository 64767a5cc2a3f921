"""Geometry of charts: bars and lines stand where their values say."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.report.html.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    histogram,
    histogram_chart,
    line_chart,
    nice_ticks,
)

POSITIVE = st.floats(0.5, 1e6, allow_nan=False)


@given(values=st.lists(POSITIVE, min_size=1, max_size=60))
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    shape = histogram(values)
    assert sum(shape.counts) == len(values)
    assert (np.diff(shape.edges) > 0).all()
    assert shape.edges[0] <= min(values)
    assert max(values) <= shape.edges[-1]


@given(values=st.lists(POSITIVE, min_size=1, max_size=60))
def test_bars_are_as_tall_as_their_counts_and_inside_the_box(values: list[float]) -> None:
    chart = histogram_chart(values, "Ratio", "flat / tree")
    counts = histogram(values).counts
    top = chart.y_range[1]
    for bar, count in zip(chart.bars, counts, strict=True):
        assert bar.height == pytest.approx(count / top * (HEIGHT - BOTTOM - TOP), abs=0.02)
        assert LEFT <= chart.left <= bar.x <= bar.x + bar.width <= chart.right <= WIDTH - RIGHT


def test_wide_ranges_get_logarithmic_bins() -> None:
    assert histogram([1.0, 100.0]).is_logarithmic
    assert not histogram([1.0, 3.0]).is_logarithmic
    assert not histogram([0.0, 100.0]).is_logarithmic


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    ticks = nice_ticks(low, low + width)
    assert 1 <= len(ticks) <= 9
    assert all(low - width * 1e-6 <= tick <= low + width * (1 + 1e-6) for tick in ticks)
    around = nice_ticks(low, low + width, outside=True)
    assert around[0] <= low + width * 1e-6
    assert around[-1] >= low + width * (1 - 1e-6)


def points_of(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) (-?[\d.]+)", path)]


def test_a_line_passes_through_its_values() -> None:
    chart = line_chart([("loss", [0, 5, 10], [4.0, 2.0, 0.0])], "Loss", "step", "nats")
    (line,) = chart.lines
    middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    assert points_of(line.path) == [(LEFT, TOP), middle, (WIDTH - RIGHT, HEIGHT - BOTTOM)]
    assert "loss from 4 to 0" in chart.summary


def test_long_lines_keep_their_peaks() -> None:
    ys = np.sin(np.arange(20_000) / 50)
    ys[12_345] = 9.0
    chart = line_chart([("loss", np.arange(20_000), ys)], "Loss", "step", "nats")
    (line,) = chart.lines
    assert len(line.xs) <= MAX_POINTS + 2
    assert max(line.ys) == 9.0
    assert line.xs[0] == 0
    assert line.xs[-1] == 19_999


def test_one_point_and_equal_values_are_drawn() -> None:
    chart = line_chart([("loss", [3], [2.5])], "Loss", "step", "nats")
    assert chart.lines[0].path.endswith("a3 3 0 1 0 6 0a3 3 0 1 0-6 0")  # a circle
    assert chart.y_range[0] < 2.5 < chart.y_range[1]


def test_steps_hold_their_value_and_are_filled_to_zero() -> None:
    chart = line_chart([("live", [0, 1, 2], [5, 10, 10])], "M", "s", "t", is_stepped=True, from_zero=True)
    assert "H" in chart.lines[0].path
    assert chart.lines[0].path.endswith("Z")
    assert chart.y_range[0] == 0


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-7, 1e6), last=st.integers(1, 10**6))
def test_no_label_is_cut(low: float, width: float, last: int) -> None:
    """At 9 pixels a character, the widest digit of the page's largest font."""
    chart = line_chart([("gap", [0, last], [low, low + width])], "Gap", "step", "x")
    assert all(chart.left - 6 - 9 * len(label) >= 0 for _, label in chart.y_ticks)
    assert all(x - 4.5 * len(label) >= 0 and x + 4.5 * len(label) <= WIDTH for x, label in chart.x_ticks)


def test_no_two_ticks_have_the_same_label() -> None:
    chart = line_chart([("share ratio", [1, 2], [2.2857, 2.2898])], "Share ratio", "step", "flat / tree")
    labels = [label for _, label in chart.y_ticks]
    assert len(set(labels)) == len(labels) > 2
