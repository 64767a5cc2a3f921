"""The leaves of a step's trees side by side, with integer costs.

Leaves of all trees are in depth-first order. Leaf `k` adds `new[k]` to the cost of the leaves before it; a run of
leaves that does not begin at its tree's first leaf recomputes the path above, which costs `above[k]`. So a run
`[i, j)` costs `above[i] + sum(new[i:j])`, for any tree and any cut. Costs are integers: every machine computes the same
placement, and loads do not drift while runs are moved.

Leaves that must stay on one rank (the rows of a rollout, or all of a tree) are joined to one leaf with several paths.

Letters: L leaves, N trajectories, S segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treewise.base.arrays import Bools, Floats, Ints
from treewise.distributed.placement.cost_model import CostModel
from treewise.planning.partition import FORWARD_FRACTION, PAIR_FORWARD_FRACTION, Trunk, cut_trunks
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import Segments

# The costs of a step add up to about 2**COST_BITS units: fine enough for any step, and no overflow of int64.
COST_BITS = 44


@dataclass(frozen=True, slots=True)
class Leaves:
    """Leaves of a step in depth-first order, tree after tree.

    new: [L] int64, cost of the tokens that a leaf adds to its tree. above: [L] int64, cost of the path above those
    tokens (0 at a tree's first leaf). dip: [L] int64, the least of `above` over the leaves that were joined to this
    one: an upper bound of the path that leaves on both sides of it have in common. before: [L + 1] int64, cumulative
    sums of `new`. tree: [L] int64. of_trajectory: [N] int64, the leaf of each trajectory; a trajectory that ends
    inside a tree belongs to the first leaf below its end. seconds_per_unit: seconds of one unit of cost.
    """

    new: Ints
    above: Ints
    dip: Ints
    before: Ints
    tree: Ints
    of_trajectory: Ints
    seconds_per_unit: float

    @property
    def path_cost(self) -> Ints:
        """[L] int64, cost of each leaf alone, its whole path."""
        return self.above + self.new

    def starts_tree(self) -> Bools:
        """[L] bool, the first leaf of each tree."""
        return np.diff(self.tree, prepend=-1) > 0

    def joined(self, may_cut: Bools) -> "Leaves":
        """Joins each leaf before which no cut is allowed to the leaf before it.

        may_cut: [L] bool, True for the first leaf. Joined trees become one; across their border no path is common.
        """
        first = np.flatnonzero(may_cut)
        before = np.append(self.before[first], self.before[-1])
        index = np.searchsorted(first, np.arange(len(self.new)), side="right") - 1
        return Leaves(
            new=np.diff(before),
            above=self.above[first],
            dip=np.minimum.reduceat(self.above, first),
            before=before,
            tree=np.cumsum(self.starts_tree()[first]) - 1,
            of_trajectory=index[self.of_trajectory],
            seconds_per_unit=self.seconds_per_unit,
        )

    def counted(self, unit: int) -> "Leaves":
        """Leaves that also cost `unit` for each of their trajectories."""
        new = self.new + unit * np.bincount(self.of_trajectory, minlength=len(self.new))
        return replace(self, new=new, before=np.concatenate([[0], np.cumsum(new)]))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The segments of a step side by side, and the cost of each in units.

    once: [S] int64, its tokens and pairs computed once, and their fraction of a full micro-batch. recompute: [S] int64,
    extra cost of its open tokens if every tree is whole: a second forward, and launches of their trunks. num_open: [S]
    int64, number of open tokens. seconds_per_unit: seconds of one unit of cost.
    """

    segments: Segments
    once: Ints
    recompute: Ints
    num_open: Ints
    seconds_per_unit: float
    cost: CostModel
    max_tokens: int | None

    def leaves(self, units: Ints | None = None) -> Leaves:
        """The leaves. units: [S] int64 costs of the segments; None: as if every tree is whole."""
        segments, units = self.segments, self.once + self.recompute if units is None else units
        end = np.append(segments.start[1:], segments.num_tokens)
        last = np.flatnonzero(segments.subtree_end == end)
        first = np.concatenate([[0], last[:-1] + 1])  # a leaf's new segments begin after the leaf before it
        before = np.concatenate([[0], np.cumsum(np.add.reduceat(units, first))])
        # From the root to the begin of each leaf's own segments: a cost counts from its segment to its subtree's end.
        change = np.append(units, 0)
        np.subtract.at(change, np.searchsorted(segments.start, segments.subtree_end), units)
        above = np.cumsum(change)[first] - units[first]
        return Leaves(
            new=np.diff(before),
            above=above,
            dip=above,
            before=before,
            tree=np.cumsum(segments.parent[first] < 0) - 1,
            of_trajectory=np.searchsorted(last, segments.end_segment),
            seconds_per_unit=self.seconds_per_unit,
        )

    def open_part(self, part: Segments) -> tuple[Ints, Ints]:
        """([S of the part] int64 each) extra cost of the open tokens of a part of a tree, and their number."""
        seconds, num_open = _open_seconds(part, self.cost, self.max_tokens)
        return np.round(seconds / self.seconds_per_unit).astype(np.int64), num_open

    def units_of_second_forward(self, length: Ints, depth: Ints) -> Ints:
        """[S] int64, cost units of a recomputed forward of the first `length` tokens ([S]) from `depth` ([S]), rounded
        down.
        """
        return np.floor(_second_forward(length, depth, self.cost) / self.seconds_per_unit).astype(np.int64)


def costs_of(shapes: Sequence[Forest | Segments], cost: CostModel, max_tokens: int | None) -> StepCosts:
    """Costs of several forests under a budget (None: whole forests in one micro-batch)."""
    segments = Segments.concatenate([shape.segments if isinstance(shape, Forest) else shape for shape in shapes])
    length = segments.lengths
    once = cost.seconds_per_token * length + cost.seconds_per_pair * _pairs(segments.depth, length)
    if max_tokens is not None:
        once += cost.seconds_per_micro_batch / max_tokens * length
    recompute, num_open = _open_seconds(segments, cost, max_tokens)
    scale = 2.0 ** np.floor(COST_BITS - np.log2(once.sum() + recompute.sum()))
    units = np.maximum(np.round(once * scale), 1).astype(np.int64)
    recompute_units = np.round(recompute * scale).astype(np.int64)
    return StepCosts(segments, units, recompute_units, num_open, 1 / scale, cost, max_tokens)


def slice_of(segments: Segments, first: int, stop: int, trajectories: Ints) -> Segments:
    """One tree of a forest: segments `first` to `stop`, and these of its trajectories ([n] int64 indices)."""
    shift, parent = segments.start[first], segments.parent[first:stop]
    return Segments(
        start=segments.start[first:stop] - shift,
        parent=np.where(parent >= 0, parent - first, -1),
        depth=segments.depth[first:stop],
        subtree_end=segments.subtree_end[first:stop] - shift,
        end_segment=segments.end_segment[trajectories] - first,
        source=segments.start[first:stop],
        num_tokens=int(segments.subtree_end[first] - shift),
    )


def _open_seconds(segments: Segments, cost: CostModel, max_tokens: int | None) -> tuple[Floats, Ints]:
    """[S] float64, extra cost of the open tokens of each segment; [S] int64, their number."""
    trunks = [] if max_tokens is None else cut_trunks(segments, max_tokens, "auto")
    if not trunks:
        return np.zeros(len(segments.start)), np.zeros(len(segments.start), dtype=np.int64)
    assert max_tokens is not None
    twice = _covered(segments, [(trunk, 1) for trunk in trunks if not trunk.is_held]).astype(np.int64)
    # A trunk runs once or twice; `once` already counts each token's fraction of a full micro-batch.
    launches = [(trunk, (1 if trunk.is_held else 2) / trunk.num_tokens - 1 / max_tokens) for trunk in trunks]
    seconds = cost.seconds_per_micro_batch * np.maximum(_covered(segments, launches), 0)
    num_open = _covered(segments, [(trunk, 1) for trunk in trunks]).astype(np.int64)
    return seconds + _second_forward(twice, segments.depth, cost), num_open


def _second_forward(length: Ints, depth: Ints, cost: CostModel) -> Floats:
    """Seconds of a forward of the first `length` tokens of segments that begin at `depth`."""
    pairs = PAIR_FORWARD_FRACTION * cost.seconds_per_pair * _pairs(depth, length)
    return FORWARD_FRACTION * cost.seconds_per_token * length + pairs


def _pairs(depth: Ints, length: Ints) -> Ints:
    """Attention pairs of the first `length` tokens of segments that begin at `depth`."""
    return length * depth + length * (length + 1) // 2


def _covered(segments: Segments, trunks: Sequence[tuple[Trunk, float]]) -> Floats:
    """[S] float64, the total weight of each segment's tokens in trunks, which are its first ones.

    trunks: each with the weight of one of its tokens.
    """
    ranges = sorted((start, end, weight) for trunk, weight in trunks for start, end in trunk.ranges)
    if not ranges:
        return np.zeros(len(segments.start))
    starts = np.array([start for start, _, _ in ranges], dtype=np.int64)
    lengths = np.array([end - start for start, end, _ in ranges], dtype=np.int64)
    weights = np.array([weight for _, _, weight in ranges])
    total = np.concatenate([[0.0], np.cumsum(lengths * weights)])
    bounds = np.append(segments.start, segments.num_tokens)
    index = np.searchsorted(starts, bounds, side="right") - 1
    inside = np.clip(bounds - starts[index], 0, lengths[index]) * weights[index]
    return np.diff(np.where(index >= 0, total[index] + inside, 0))
