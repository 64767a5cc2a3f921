"""The row segments that a recurrent layer scans in one go, where each takes its initial state from, and in which order.

NumPy only. A row segment is a maximal run of rows of one micro-batch in which every row but the first continues the row
before it, and no row but the last is followed by several tokens. The token above its first row is the last row of
another segment, or a token of a micro-batch above (a cut, which may lie inside a segment of the forest), or nothing.

A segment is scanned after the one that it continues. Segments are taken by height (how many segments lie below), not by
depth: a chain of turns with side branches then takes one small call per turn of the chain, and one call for all
branches together. Segments of one height share a padded batch where padding costs less than another call.
"""

from dataclasses import dataclass

import numpy as np

from treewise.planning.plans import FORWARD, HOLD, Layout, Plan
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import concatenated_ranges

# Padded tokens that cost as much as one more call of a scan.
CALL_TOKENS = 32
NOTHING, GATEWAY = -1, -2


@dataclass(frozen=True, slots=True)
class RowSegments:
    """Row segments of one micro-batch, in row order. Letters: S segments, P cuts.

    start, end: [S] int64 rows. parent: [S] int64, segment that ends at the token above, -1 where it is elsewhere or
    there is none. gateway: [S] int64, which gateway of the layout holds the token above, -1 for none; gateway_row: [S]
    int64, its row in that micro-batch. cuts: [P] int64 segments whose last row is above tokens of other micro-batches.
    """

    start: np.ndarray
    end: np.ndarray
    parent: np.ndarray
    gateway: np.ndarray
    gateway_row: np.ndarray
    cuts: np.ndarray

    @property
    def num_segments(self) -> int:
        return len(self.start)

    @property
    def length(self) -> np.ndarray:
        return self.end - self.start

    @property
    def cut_rows(self) -> np.ndarray:
        """[P] int64 ascending rows whose states and tails the gateway keeps."""
        return self.end[self.cuts] - 1


def row_segments(plan: Plan, micro_batch: int, layout: Layout) -> RowSegments:
    """The row segments of one micro-batch, by its index in the plan."""
    forest, positions, batch = plan.forest, layout.positions, plan.micro_batches[micro_batch]
    above = forest.parent[positions]
    fork_rows, _ = _branches(forest, positions)
    begins = np.ones(len(positions), dtype=bool)
    begins[1:] = above[1:] != positions[:-1]
    begins[fork_rows[fork_rows + 1 < len(positions)] + 1] = True
    start = np.flatnonzero(begins)
    end = np.append(start[1:], len(positions))
    parent, gateway, gateway_row = (np.full(len(start), -1) for _ in range(3))
    row, is_own = _find(above[start], positions)
    parent[is_own] = np.searchsorted(end, row[is_own], side="right")
    for other in batch.parents:
        row, is_there = _find(above[start], plan.micro_batches[other].positions())
        gateway[is_there] = np.searchsorted(layout.gateway_batches, other)
        gateway_row[is_there] = row[is_there]
    behind = cut_rows(plan, micro_batch) if batch.is_open else np.zeros(0, dtype=np.int64)
    cuts = np.searchsorted(end, behind, side="right")
    assert np.array_equal(end[cuts] - 1, behind), "a token above tokens of other micro-batches ends its segment"
    return RowSegments(start, end, parent, gateway, gateway_row, cuts)


def peak_cuts(plan: Plan) -> int:
    """The most states alive in gateways at one time: one per layer for each token that other micro-batches continue."""
    num_cuts = {index: len(cut_rows(plan, index)) for index, batch in enumerate(plan.micro_batches) if batch.is_open}
    alive = peak = 0
    for step in plan.schedule:
        if step.action in (FORWARD, HOLD):
            alive += num_cuts[step.micro_batch]
        peak = max(peak, alive)
        if step.action not in (FORWARD, HOLD):
            alive -= num_cuts.get(step.micro_batch, 0)
    return peak


def cut_rows(plan: Plan, micro_batch: int) -> np.ndarray:
    """[P] int64 ascending, rows of a micro-batch that are the parent of a token of another one."""
    forest, positions = plan.forest, plan.micro_batches[micro_batch].positions()
    fork_rows, fork_children = _branches(forest, positions)
    _, is_here = _find(fork_children, positions)
    # Beside branches, rows whose first child, the token after them, belongs to another micro-batch.
    is_followed = np.append(positions[1:] == positions[:-1] + 1, False)
    following = np.minimum(positions + 1, forest.num_tokens - 1)
    cut_behind = np.flatnonzero(~is_followed & (forest.parent[following] == positions))
    return np.unique(np.concatenate([cut_behind, fork_rows[~is_here]]))


def rows_before(segments: RowSegments, count: int) -> np.ndarray:
    """[S, count] int64, the `count` tokens above each segment, nearest last.

    A row index; -1 where there is no token; `-2 - (segment * count + entry)` for entry `entry` of the tail that the
    gateway keeps for the token above `segment` (its last entry is that token).
    """
    rows = np.full((segments.num_segments, count), -1)
    # Segments in order, so the rows of a parent are known before those of its children.
    order = np.arange(count)
    for segment, (parent, gateway) in enumerate(zip(segments.parent.tolist(), segments.gateway.tolist(), strict=True)):
        if gateway >= 0:
            rows[segment] = -2 - (segment * count + order)
        elif parent >= 0:
            first, last = segments.start[parent], segments.end[parent]
            own = min(count, int(last - first))
            rows[segment, count - own :] = np.arange(last - own, last)
            rows[segment, : count - own] = rows[parent, own:]
    return rows


def rows_up_to_end(segments: RowSegments, before: np.ndarray, which: np.ndarray) -> np.ndarray:
    """[len(which), count], the last `count` tokens up to the end of segments, coded as in `rows_before`."""
    count = before.shape[1]
    position = segments.end[which, None] - count + np.arange(count)
    missing = np.maximum(segments.start[which, None] - position, 0)  # how far before the segment a position lies
    column = np.clip(count - missing, 0, count - 1) if count else missing
    return np.where(missing > 0, np.take_along_axis(before[which], column, axis=1), position)


def _branches(forest: Forest, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Further children of forks among some tokens: rows of the forks, tree positions of the children, [b] int64."""
    above, children = forest.branches
    first = np.searchsorted(above, positions)
    count = np.searchsorted(above, positions, side="right") - first
    row = np.repeat(np.arange(len(positions)), count)
    index = concatenated_ranges(first, count)
    return row, children[index]


def _find(values: np.ndarray, ascending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions of values in an ascending array, and whether they are there at all."""
    position = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return position, ascending[position] == values


# -- the schedule -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateSource:
    """Initial states of some segments of a batch that come from one source.

    batch: index of the batch that ended with them, `GATEWAY`, or `NOTHING` (zeros). index: [n] int64 in its states.
    """

    batch: int
    index: np.ndarray


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Segments scanned side by side, padded on the right to `length` tokens.

    segments: [B] int64, ordered as the sources give their initial states. wants_states: whether end states are needed.
    """

    segments: np.ndarray
    length: int
    wants_states: bool
    sources: tuple[StateSource, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Batches in order, and the padded axis that they share.

    order: [sum of B * length] int64, the row at each padded position, -1 for padding. position: [T] int64, the
    inverse. cuts: (batch, index in it) of each cut segment. entering: segments whose state comes from a gateway.
    """

    batches: tuple[SegmentBatch, ...]
    order: np.ndarray
    position: np.ndarray
    cuts: tuple[tuple[int, int], ...]
    entering: np.ndarray

    @property
    def sizes(self) -> list[int]:
        return [len(batch.segments) * batch.length for batch in self.batches]


def make_schedule(segments: RowSegments) -> Schedule:
    """Batches by falling height; parents come before children."""
    below, above = [0] * segments.num_segments, segments.parent.tolist()  # segments on the longest way down
    for segment in range(len(above) - 1, -1, -1):  # parents precede children
        if above[segment] >= 0:
            below[above[segment]] = max(below[above[segment]], below[segment] + 1)
    height = np.array(below, dtype=np.int64)
    entering = np.flatnonzero(segments.gateway >= 0)
    is_read = np.zeros(segments.num_segments, dtype=bool)
    is_read[segments.parent[segments.parent >= 0]] = True
    is_read[segments.cuts] = True
    batch_of, index_of = np.full(segments.num_segments, NOTHING), np.zeros(segments.num_segments, dtype=np.int64)
    batches: list[SegmentBatch] = []
    by_height = np.argsort(-height, kind="stable")
    for level in np.split(by_height, np.flatnonzero(np.diff(height[by_height])) + 1):
        for wants_states in (True, False):
            for chosen in _side_by_side(level[is_read[level] == wants_states], segments.length):
                batch = _batch(chosen, segments, batch_of, index_of, entering, wants_states)
                batch_of[batch.segments], index_of[batch.segments] = len(batches), np.arange(len(chosen))
                batches.append(batch)
    order, position = _padded_axis(batches, segments)
    cuts = tuple(zip(batch_of[segments.cuts].tolist(), index_of[segments.cuts].tolist(), strict=True))
    return Schedule(tuple(batches), order, position, cuts, entering)


def _batch(
    chosen: np.ndarray,
    segments: RowSegments,
    batch_of: np.ndarray,
    index_of: np.ndarray,
    entering: np.ndarray,
    wants_states: bool,
) -> SegmentBatch:
    parent = segments.parent[chosen]
    source = np.where(parent >= 0, batch_of[parent], np.where(segments.gateway[chosen] >= 0, GATEWAY, NOTHING))
    index = np.where(parent >= 0, index_of[parent], np.searchsorted(entering, chosen))
    by_source = np.argsort(source, kind="stable")
    chosen, source, index = chosen[by_source], source[by_source], index[by_source]
    sources = tuple(StateSource(int(each), index[source == each]) for each in np.unique(source))
    return SegmentBatch(chosen, int(segments.length[chosen].max()), wants_states, sources)


def _side_by_side(members: np.ndarray, length: np.ndarray) -> list[np.ndarray]:
    """Splits segments into batches so that padded tokens plus calls cost least.

    Only batches of neighbouring lengths are tried, cut where the length passes a power of two.
    """
    if not len(members):
        return []
    members = members[np.argsort(length[members], kind="stable")]
    sizes = length[members]
    bounds = np.append(np.flatnonzero(np.diff(np.ceil(np.log2(sizes)), prepend=-1)), len(members)).tolist()
    # cheapest[j]: cost of everything before bounds[j], and where its last batch begins
    cheapest: list[tuple[int, int]] = [(0, 0)]
    for last in range(1, len(bounds)):
        longest = int(sizes[bounds[last] - 1])
        costs = [
            (cheapest[first][0] + CALL_TOKENS + (bounds[last] - bounds[first]) * longest, first)
            for first in range(last)
        ]
        cheapest.append(min(costs))
    batches, last = [], len(bounds) - 1
    while last > 0:
        first = cheapest[last][1]
        batches.append(members[bounds[first] : bounds[last]])
        last = first
    return batches[::-1]


def _padded_axis(batches: list[SegmentBatch], segments: RowSegments) -> tuple[np.ndarray, np.ndarray]:
    """The order and the position of a schedule."""
    parts = []
    for batch in batches:
        step = np.arange(batch.length)
        rows = segments.start[batch.segments, None] + step
        parts.append(np.where(step < segments.length[batch.segments, None], rows, -1).ravel())
    order = np.concatenate(parts)
    position = np.empty(int(segments.end[-1]), dtype=np.int64)
    is_row = order >= 0
    position[order[is_row]] = np.flatnonzero(is_row)
    return order, position
