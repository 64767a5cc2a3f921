"""Charts as values, which the page's script draws (static/charts.js); the geometry of rollout trees and bills."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treewise.report.analysis.bill import Bill, figure_of, measure
from treewise.report.analysis.online_log import RewardTree

NUM_BINS = 18
MAX_POINTS = 500  # of a line; more are thinned to the extremes of each column
LOG_RANGE = 6.0  # values that span more than this factor get logarithmic bins
ROW = 18  # pixels of a row of a tree of rollouts
TREE_WIDTH, TREE_TOP, TREE_LEFT, TREE_RIGHT = 820, 14, 10, 70
PROMPT = 40  # pixels of the prompt, whose length says nothing of the rollouts


@dataclass(frozen=True, slots=True)
class Line:
    """A curve of a chart: its values, by ascending xs."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values between edges; logarithmic where the values span a wide range."""

    edges: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    is_logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Chart(Histogram):
    """Bars, or lines; stepped ones hold a value until the next, and are filled. summary: the same in words, for screen
    readers.
    """

    title: str = ""
    x_label: str = ""
    y_label: str = ""
    summary: str = ""
    x_range: tuple[float, float] = (0.0, 1.0)
    y_range: tuple[float, float] = (0.0, 1.0)
    lines: tuple[Line, ...] = ()
    is_stepped: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON values for the script."""
        return asdict(self)


def histogram(values: Sequence[float]) -> Histogram:
    """How values are distributed, in at most `NUM_BINS` bins."""
    data = np.asarray(values, dtype=float)
    low, high = float(data.min()), float(data.max())
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low * 0.9 if low else 0.0, high * 1.1 if high else 1.0
    is_logarithmic = low > 0 and high / low > LOG_RANGE
    make = np.geomspace if is_logarithmic else np.linspace
    edges = make(low, high, NUM_BINS + 1)
    edges[0], edges[-1] = low, high  # geomspace may round the extremes away
    counts, _ = np.histogram(data, edges)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()), is_logarithmic)


def histogram_chart(values: Sequence[float], title: str, x_label: str, what: str = "trees") -> Chart:
    """A chart of how many of `what` have which value."""
    shape = histogram(values)
    return Chart(
        **asdict(shape),
        title=title,
        x_label=x_label,
        y_label=what,
        summary=f"{title}: median {_plain(float(np.median(values)))}, from {_plain(min(values))} to "
        f"{_plain(max(values))}, over {len(values):,} {what}.",
        x_range=(shape.edges[0], shape.edges[-1]),
        y_range=(0.0, float(max(shape.counts))),
    )


def line_chart(
    series: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    title: str,
    x_label: str,
    y_label: str,
    *,
    is_stepped: bool = False,
    from_zero: bool = False,
) -> Chart:
    """Lines of (label, xs, ys)."""
    lines = tuple(_thinned(label, np.asarray(xs, float), np.asarray(ys, float)) for label, xs, ys in series)
    every_x = [x for line in lines for x in line.xs]
    every_y = [y for line in lines for y in line.ys]
    described = "; ".join(f"{line.label} from {line.ys[0]:.4g} to {line.ys[-1]:.4g}" for line in lines)
    return Chart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        summary=f"{title} by {x_label}: {described}.",
        x_range=_widened(min(every_x), max(every_x)),
        y_range=_widened(min(0.0, *every_y) if from_zero else min(every_y), max(every_y)),
        lines=lines,
        is_stepped=is_stepped,
    )


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty."""
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))


def _thinned(label: str, xs: np.ndarray, ys: np.ndarray) -> Line:
    """At most `MAX_POINTS` points: the lowest and the highest of each column, so that no peak is lost."""
    if len(xs) > MAX_POINTS:
        columns = np.array_split(np.arange(len(xs)), MAX_POINTS // 2)
        extremes = {int(column[at]) for column in columns for at in (ys[column].argmin(), ys[column].argmax())}
        order = np.array(sorted(extremes | {0, len(xs) - 1}))
        xs, ys = xs[order], ys[order]
    return Line(label, tuple(xs.tolist()), tuple(ys.tolist()))


def _plain(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


# -- trees of rollouts: pieces from left to right by tokens, values at forks, rewards at ends --------------------------


@dataclass(frozen=True, slots=True)
class Mark:
    """A fork with its value, or an end with its reward."""

    x: float
    y: float
    text: str
    is_leaf: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """SVG paths and marks in a box of `width` by `height` pixels."""

    width: int
    height: int
    paths: tuple[str, ...]
    marks: tuple[Mark, ...]


def drawing(tree: RewardTree) -> Drawing:
    """Where everything of a tree is drawn."""
    longest = max(piece.end for piece in tree.pieces)
    rows = max(piece.row for piece in tree.pieces)
    per_token = (TREE_WIDTH - TREE_LEFT - TREE_RIGHT - PROMPT) / max(1, longest - tree.prompt_tokens)

    def x(depth: int) -> float:
        if depth <= tree.prompt_tokens:
            return TREE_LEFT + PROMPT * depth / max(1, tree.prompt_tokens)
        return TREE_LEFT + PROMPT + per_token * (depth - tree.prompt_tokens)

    def y(row: float) -> float:
        return TREE_TOP + ROW * row

    paths, marks = [], []
    for piece in tree.pieces:
        at = y(piece.row)
        above = at if piece.parent < 0 else y(tree.pieces[piece.parent].row)
        paths.append(f"M{x(piece.start):.1f} {above:.1f}V{at:.1f}H{x(piece.end):.1f}")
        marks.append(Mark(round(x(piece.end), 1), round(at, 1), f"{piece.value:.3g}", piece.is_leaf))
    return Drawing(TREE_WIDTH, int(2 * TREE_TOP + ROW * rows), tuple(paths), tuple(marks))


# -- the bill: a bar for each way of training --------------------------------------------------------------------------

BAR_WIDTH, BAR_ROW = 460, 50  # pixels


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled bar, its top and its width in pixels."""

    label: str
    text: str
    y: int
    width: float


def bars_of(bill: Bill) -> list[Bar]:
    """A bar for each way, for as many episodes as the bill is made out for; the longest has the whole width."""
    ways = bill.per_episodes
    longest = max(map(measure, ways))
    return [
        Bar(way.name, figure_of(way)[1], index * BAR_ROW, round(BAR_WIDTH * measure(way) / longest, 1))
        for index, way in enumerate(ways)
    ]
