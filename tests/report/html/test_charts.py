"""Charts as values: bins, ranges and thinned lines; `test_browser.py` looks at what is drawn of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treewise.report.html.charts import MAX_POINTS, histogram, histogram_chart, line_chart

POSITIVE = st.floats(0.5, 1e6, allow_nan=False)


@given(values=st.lists(POSITIVE, min_size=1, max_size=60))
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    shape = histogram(values)
    assert sum(shape.counts) == len(values)
    assert (np.diff(shape.edges) > 0).all()
    assert shape.edges[0] <= min(values)
    assert max(values) <= shape.edges[-1]
    chart = histogram_chart(values, "Ratio", "flat / tree")
    assert (chart.counts, chart.x_range, chart.y_range[1]) == (
        shape.counts,
        shape.edges[:: len(shape.counts)],
        max(shape.counts),
    )


def test_wide_ranges_get_logarithmic_bins() -> None:
    assert histogram([1.0, 100.0]).is_logarithmic
    assert not histogram([1.0, 3.0]).is_logarithmic
    assert not histogram([0.0, 100.0]).is_logarithmic


def test_a_line_has_its_values_and_its_words() -> None:
    chart = line_chart([("loss", [0, 5, 10], [4.0, 2.0, 0.0])], "Loss", "step", "nats")
    assert (chart.lines[0].xs, chart.lines[0].ys) == ((0.0, 5.0, 10.0), (4.0, 2.0, 0.0))
    assert (chart.x_range, chart.y_range) == ((0.0, 10.0), (0.0, 4.0))
    assert "loss from 4 to 0" in chart.summary
    assert line_chart([("speed", [0, 1], [5.0, 6.0])], "S", "s", "t", from_zero=True).y_range == (0.0, 6.0)


def test_long_lines_keep_their_peaks() -> None:
    ys = np.sin(np.arange(20_000) / 50)
    ys[12_345] = 9.0
    (line,) = line_chart([("loss", np.arange(20_000), ys)], "Loss", "step", "nats").lines
    assert len(line.xs) <= MAX_POINTS + 2
    assert max(line.ys) == 9.0
    assert (line.xs[0], line.xs[-1]) == (0, 19_999)


def test_a_range_is_never_empty() -> None:
    chart = line_chart([("loss", [3], [2.5])], "Loss", "step", "nats")
    assert chart.x_range[0] < 3 < chart.x_range[1]
    assert chart.y_range[0] < 2.5 < chart.y_range[1]
