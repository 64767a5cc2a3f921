"""The geometry of charts and of trees of rollouts, drawn as SVG by the page's template.

Nothing here is text of the data: labels are numbers and words of ours, and the template escapes them all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treewise.report.analysis.online_log import RewardTree

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40  # margins; the first two are wider where labels need it
CHARACTER = 9.2  # width of one in a label, at the font of narrow screens
NUM_BINS = 18
MAX_POINTS = 500  # of a line; more are thinned to the extremes of each column
LOG_RANGE = 6.0  # values that span more than this factor get logarithmic bins
ROW = 18  # pixels of a row of a tree of rollouts
TREE_WIDTH, TREE_TOP, TREE_LEFT, TREE_RIGHT = 820, 14, 10, 70
PROMPT = 40  # pixels of the prompt, whose length says nothing of the rollouts

Tick = tuple[float, str]  # position in the box, label


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle with its label."""

    x: float
    y: float
    width: float
    height: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A polyline (an SVG path) and its values, for reading them off. `is_area`: filled down to zero."""

    label: str
    path: str
    is_area: bool
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. left, right: ends of the box that holds bars and lines. summary: the same in words, for screen
    readers.
    """

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    summary: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float
    right: float
    bars: tuple[Bar, ...] = ()
    lines: tuple[Line, ...] = ()

    def reading(self) -> dict[str, Any]:
        """JSON values that the page shows under the pointer."""
        lines = [{"label": line.label, "xs": line.xs, "ys": line.ys} for line in self.lines]
        box = (self.left, self.right)
        return {"x_range": self.x_range, "y_range": self.y_range, "box": box, "x_label": self.x_label, "lines": lines}


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values between edges; logarithmic where the values span a wide range."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    is_logarithmic: bool


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
    """Bars of `histogram`."""
    shape = histogram(values)
    edges, counts = np.array(shape.edges), np.array(shape.counts)
    top, y_ticks = _count_axis(int(counts.max()))
    ticks = _log_ticks(edges[0], edges[-1]) if shape.is_logarithmic else nice_ticks(edges[0], edges[-1])
    x_labels, y_labels = [_short(tick) for tick in ticks], [f"{tick:,.0f}" for tick in y_ticks]
    left, right = _box(x_labels, y_labels)
    to_x = _scale(edges[0], edges[-1], left, right, is_logarithmic=shape.is_logarithmic)
    to_y = _scale(0.0, top, HEIGHT - BOTTOM, TOP)
    bars = []
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        x, end, y = to_x(low), to_x(high), to_y(float(count))
        label = f"{_short(low)} to {_short(high)}: {count:,} {what}"
        bars.append(Bar(round(x + 0.75, 2), round(y, 2), round(end - x - 1.5, 2), round(to_y(0) - y, 2), label))
    median = float(np.median(values))
    return Chart(
        title,
        x_label,
        what,
        tuple(zip(map(to_x, ticks), x_labels, strict=True)),
        tuple(zip(map(to_y, y_ticks), y_labels, strict=True)),
        f"{title}: median {_plain(median)}, from {_plain(min(values))} to {_plain(max(values))}, "
        f"over {len(values):,} {what}.",
        (float(edges[0]), float(edges[-1])),
        (0.0, top),
        left,
        right,
        bars=tuple(bars),
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
    """Lines of (label, xs, ys). Stepped ones hold a value until the next, and are filled."""
    thinned = [(label, *_thinned(np.asarray(xs, dtype=float), np.asarray(ys, dtype=float))) for label, xs, ys in series]
    all_x, all_y = np.concatenate([each[1] for each in thinned]), np.concatenate([each[2] for each in thinned])
    x_low, x_high = _widened(float(all_x.min()), float(all_x.max()))
    y_low, y_high = _widened(min(0.0, float(all_y.min())) if from_zero else float(all_y.min()), float(all_y.max()))
    y_ticks = nice_ticks(y_low, y_high, outside=True)
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])
    x_ticks = nice_ticks(x_low, x_high)
    x_labels, y_labels = _labels(x_ticks), _labels(y_ticks)
    left, right = _box(x_labels, y_labels)
    to_x = _scale(x_low, x_high, left, right)
    to_y = _scale(y_low, y_high, HEIGHT - BOTTOM, TOP)
    lines = []
    for label, xs, ys in thinned:
        points = [(to_x(x), to_y(y)) for x, y in zip(xs, ys, strict=True)]
        path = _path(points, is_stepped, to_y(0.0) if is_stepped else None)
        lines.append(Line(label, path, is_stepped, tuple(xs.tolist()), tuple(ys.tolist())))
    described = "; ".join(f"{label} from {_short(ys[0])} to {_short(ys[-1])}" for label, _, ys in thinned)
    return Chart(
        title,
        x_label,
        y_label,
        tuple(zip(map(to_x, x_ticks), x_labels, strict=True)),
        tuple(zip(map(to_y, y_ticks), y_labels, strict=True)),
        f"{title} by {x_label}: {described}.",
        (x_low, x_high),
        (y_low, y_high),
        left,
        right,
        lines=tuple(lines),
    )


def nice_ticks(low: float, high: float, count: int = 5, outside: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) in a range; `outside` adds one at or beyond each end."""
    rough = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.floor(low / step + 1e-9) if outside else math.ceil(low / step - 1e-9)
    last = math.ceil(high / step - 1e-9) if outside else math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    return inside[:: max(1, math.ceil(len(inside) / 7))]


def _count_axis(largest: int) -> tuple[float, list[float]]:
    ticks = [tick for tick in nice_ticks(0.0, float(max(1, largest)), 4, outside=True) if tick == int(tick)]
    return max(ticks[-1], 1.0), ticks


def _scale(
    low: float, high: float, first: float, last: float, *, is_logarithmic: bool = False
) -> Callable[[float], float]:
    """The map from `[low, high]` to the coordinates `[first, last]`."""
    if is_logarithmic:
        low, high = math.log(low), math.log(high)

    def to_coordinate(value: float) -> float:
        position = math.log(value) if is_logarithmic else float(value)
        return round(first + (position - low) / (high - low) * (last - first), 2)

    return to_coordinate


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty."""
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))


def _path(points: list[tuple[float, float]], is_stepped: bool, floor: float | None) -> str:
    words = [f"M{points[0][0]:g} {points[0][1]:g}"]
    for x, y in points[1:]:
        words.append(f"H{x:g}V{y:g}" if is_stepped else f"L{x:g} {y:g}")
    if floor is not None:
        words.append(f"V{floor:g}H{points[0][0]:g}Z")
    elif len(points) == 1:
        words.append("m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0")  # a circle around it
    return "".join(words)


def _thinned(xs: np.ndarray, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `MAX_POINTS` points: the lowest and the highest of each column, so that no peak is lost."""
    if len(xs) <= MAX_POINTS:
        return xs, ys
    columns = np.array_split(np.arange(len(xs)), MAX_POINTS // 2)
    extremes = {int(column[extreme]) for column in columns for extreme in (ys[column].argmin(), ys[column].argmax())}
    order = np.array(sorted(extremes | {0, len(xs) - 1}))
    return xs[order], ys[order]


def _box(x_labels: Sequence[str], y_labels: Sequence[str]) -> tuple[float, float]:
    """Ends of the box, so that no label is cut: those of y end 6 pixels before it, the last of x is centred at its
    end.
    """
    left = max(LEFT, 8 + CHARACTER * max(map(len, y_labels)))
    return left, WIDTH - max(RIGHT, CHARACTER * len(x_labels[-1]) / 2 if x_labels else 0)


def _labels(ticks: Sequence[float]) -> list[str]:
    """Labels of ticks, no two of which are the same."""
    labels = [_short(tick) for tick in ticks]
    digits = 4
    while len(set(labels)) < len(labels) and digits < 16:
        labels = [f"{tick:,.{digits}g}" for tick in ticks]
        digits += 1
    return labels


def _plain(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _short(value: float) -> str:
    """A number in at most about six characters."""
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (limit if letter != 'k' else 1e3):.3g}{letter}"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


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
