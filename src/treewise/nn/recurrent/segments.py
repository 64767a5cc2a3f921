"""The row segments that a recurrent layer scans in one go, and where each takes its initial state from.

NumPy only. A row segment is a maximal run of rows of one micro-batch in which every row but the first continues the row
before it, and no row but the last is followed by several tokens. The token above its first row is the last row of
another segment, or a token of a micro-batch above (a cut, which may lie inside a segment of the forest), or nothing.
"""

from dataclasses import dataclass

import numpy as np

from treewise.planning.layout import Layout
from treewise.planning.planner import FORWARD, HOLD, Plan
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import concatenated_ranges


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
    return np.unique(np.concatenate([_rows_cut_behind(forest, positions), fork_rows[~is_here]]))


def heights(parent: np.ndarray) -> np.ndarray:
    """[S] int64, how many segments lie below each on its longest way down; parents precede children."""
    height = [0] * len(parent)
    above = parent.tolist()
    for segment in range(len(above) - 1, -1, -1):
        if above[segment] >= 0:
            height[above[segment]] = max(height[above[segment]], height[segment] + 1)
    return np.array(height, dtype=np.int64)


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


def _rows_cut_behind(forest: Forest, positions: np.ndarray) -> np.ndarray:
    """Rows whose first child, the token after them, belongs to another micro-batch."""
    is_followed = np.append(positions[1:] == positions[:-1] + 1, False)
    following = np.minimum(positions + 1, forest.num_tokens - 1)
    return np.flatnonzero(~is_followed & (forest.parent[following] == positions))


def _find(values: np.ndarray, ascending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions of values in an ascending array, and whether they are there at all."""
    position = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return position, ascending[position] == values
