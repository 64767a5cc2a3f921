"""A lower bound of the slowest rank's cost, by which placements are measured.

Any placement whose slowest rank costs `C` satisfies three conditions:

* All ranks together compute every token once. A tree that stays whole recomputes its open tokens. A tree that is cut
  recomputes its root segment, and those open tokens above a single path that exceeds the budget: they are open on
  whichever rank has that path.
* A subtree that does not fit together with the path above it is on several ranks, and each of them computes that path.
  Below a segment with path cost `P` up to its end, the cost `below`, including copies forced further down, takes at
  least `below / (C - P)` ranks. So a `C` below the mean of what it forces ranks to compute is too small.
* The most expensive leaf is on one rank.

The bound is the smallest `C` that satisfies all three.
"""

import numpy as np

from treewise.distributed.placement.leaf_costs import Leaves, StepCosts, path_costs, slice_of
from treewise.tree.prefix_merge import Segments, restrict

# Forced copies are ignored if more segments than this fit on no rank, to bound the time.
MAX_LARGE_SEGMENTS = 20_000
NUM_HALVINGS = 12


def least_load(step: StepCosts, leaves: Leaves, num_ranks: int) -> int:
    """A lower bound of the slowest rank's cost, in units.

    leaves: of this step, joined where no cut is allowed, without the extra cost of open tokens.
    """
    mean = -(-int(step.once.sum()) // num_ranks)
    bound = max(_most_expensive_leaf(step, leaves), mean)
    forced = _Forced(step, bound)
    high = max(bound, -(-forced.total(bound) // num_ranks))
    for _ in range(NUM_HALVINGS):
        middle = (bound + high) // 2
        if forced.total(middle) > num_ranks * middle:
            bound = middle + 1
        else:
            high = middle
    return bound


def _most_expensive_leaf(step: StepCosts, leaves: Leaves) -> int:
    """Cost of the most expensive leaf by itself."""
    chosen = np.flatnonzero(leaves.of_trajectory == int(leaves.path_cost.argmax()))
    alone = restrict(step.segments, chosen)
    source = np.searchsorted(step.segments.start, alone.source)
    return int(step.once[source].sum()) + _always_open(step, alone)


def _always_open(step: StepCosts, tree: Segments) -> int:
    """Extra cost of the tokens of a tree that are open on any rank, because a path below them exceeds the budget."""
    if step.max_tokens is None:
        return 0
    length = tree.lengths
    deepest, above = (tree.depth + length).tolist(), tree.parent.tolist()
    for segment in range(len(above) - 1, 0, -1):
        if above[segment] >= 0:
            deepest[above[segment]] = max(deepest[above[segment]], deepest[segment])
    num_open = np.clip(np.array(deepest) - step.max_tokens - tree.depth, 0, length)
    return int(step.units_of_second_forward(num_open, tree.depth).sum())


class _Forced:
    """The least total cost of all ranks, as a function of the slowest rank's cost, which is at least `low`."""

    def __init__(self, step: StepCosts, low: int) -> None:
        segments, once = step.segments, step.once
        after = np.searchsorted(segments.start, segments.subtree_end)
        below = np.concatenate([[0], np.cumsum(once)])
        path, subtree = path_costs(segments, once), below[after] - below[:-1]
        roots = np.flatnonzero(segments.parent < 0)
        open_cost = np.add.reduceat(step.recompute, roots)
        # A tree is whole or cut: the smaller cost of the two.
        alone = np.zeros(len(roots), dtype=np.int64)
        for tree in np.flatnonzero(open_cost).tolist():
            alone[tree] = _always_open(step, slice_of(segments, int(roots[tree]), int(after[roots[tree]])))
        self.recompute = np.minimum(open_cost, alone + once[roots])
        self.once = int(once.sum())
        is_large = (path - once + subtree > low) & (subtree > once)
        if is_large.sum() > MAX_LARGE_SEGMENTS:
            is_large[:] = False
        large = np.flatnonzero(is_large)
        index = np.cumsum(is_large) - 1
        above = segments.parent[large]
        # Every segment above a large one is large, so parents are in this list, too.
        self.parent = np.where(above >= 0, index[above], -1).tolist()
        self.tree = (np.searchsorted(roots, large, side="right") - 1).tolist()
        self.alone = alone.tolist()
        self.own, self.path = once[large].tolist(), path[large].tolist()
        self.below = (subtree - once)[large].tolist()

    def total(self, max_load: int) -> int:
        """The least total cost if no rank costs more than `max_load`."""
        num_ranks = [1] * len(self.own)
        copied = [0] * len(self.own)
        of_tree = self.recompute.tolist()
        for segment in range(len(self.own) - 1, -1, -1):  # children before parents
            below = self.below[segment] + copied[segment]
            ranks = max(num_ranks[segment], -(-below // (max_load - self.path[segment])))
            extra = copied[segment] + (ranks - 1) * self.own[segment]
            parent = self.parent[segment]
            if parent >= 0:
                num_ranks[parent] = max(num_ranks[parent], ranks)
                copied[parent] += extra
            elif ranks > 1:
                tree = self.tree[segment]
                of_tree[tree] = max(of_tree[tree], extra + self.alone[tree])
        return self.once + sum(of_tree)
