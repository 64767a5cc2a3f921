"""What no placement can beat: the bound that placements are measured by.

Three facts, each true of any placement whose slowest rank costs `C`:

* All ranks together compute every token once. A tree that stays whole computes its open tokens again. One that is cut
  computes its root segment again, and those open tokens that have a single path below them which exceeds the budget:
  they are open on whichever rank that path lies.
* A subtree that does not fit beside the path above it lies on several ranks, and each of them computes that path. At a
  segment with path cost `P` up to its end, what lies below takes at least `below / (C - P)` ranks, copies that are
  forced further down counted. So a `C` below the mean of what it forces ranks to compute is too small.
* The most costly leaf lies on one rank.

The bound is the smallest `C` that the three allow.
"""

import numpy as np

from treewise.distributed.placement.leaf_costs import Leaves, Priced, path_costs, slice_of
from treewise.tree.prefix_merge import Segments, restrict

# A bound should cost little: beyond so many segments that fit no rank, what they force to be copied is left out.
MOST_LARGE_SEGMENTS = 20_000
NUM_HALVINGS = 12


def least_load(step: Priced, leaves: Leaves, num_ranks: int) -> int:
    """A lower bound of the slowest rank's cost, in units.

    leaves: of this step, as they may be parted, without the cost of open tokens.
    """
    mean = -(-int(step.once.sum()) // num_ranks)
    bound = max(_dearest_leaf(step, leaves), mean)
    forced = _Forced(step, bound)
    high = max(bound, -(-forced.total(bound) // num_ranks))
    for _ in range(NUM_HALVINGS):
        middle = (bound + high) // 2
        if forced.total(middle) > num_ranks * middle:
            bound = middle + 1
        else:
            high = middle
    return bound


def _dearest_leaf(step: Priced, leaves: Leaves) -> int:
    """Cost of the most costly leaf by itself."""
    chosen = np.flatnonzero(leaves.of_trajectory == int(leaves.path.argmax()))
    alone = restrict(step.segments, chosen)
    where = np.searchsorted(step.segments.start, alone.source)
    return int(step.once[where].sum()) + _always_open(step, alone)


def _always_open(step: Priced, tree: Segments) -> int:
    """What the tokens of a tree cost that are open wherever they are computed: a path below them exceeds the budget."""
    if step.max_tokens is None:
        return 0
    length = tree.lengths
    deepest, above = (tree.depth + length).tolist(), tree.parent.tolist()
    for number in range(len(above) - 1, 0, -1):
        if above[number] >= 0:
            deepest[above[number]] = max(deepest[above[number]], deepest[number])
    num_open = np.clip(np.array(deepest) - step.max_tokens - tree.depth, 0, length)
    return int(step.units_of_second_forward(num_open, tree.depth).sum())


class _Forced:
    """The least that all ranks together compute, for any cost of the slowest rank from `low` on."""

    def __init__(self, step: Priced, low: int) -> None:
        segments, once = step.segments, step.once
        after = np.searchsorted(segments.start, segments.subtree_end)
        below = np.concatenate([[0], np.cumsum(once)])
        path, subtree = path_costs(segments, once), below[after] - below[:-1]
        roots = np.flatnonzero(segments.parent < 0)
        open_cost = np.add.reduceat(step.again, roots)
        # Whole or cut: the lesser of what either computes again.
        alone = np.zeros(len(roots), dtype=np.int64)
        for tree in np.flatnonzero(open_cost).tolist():
            alone[tree] = _always_open(step, slice_of(segments, int(roots[tree]), int(after[roots[tree]])))
        self.again = np.minimum(open_cost, alone + once[roots])
        self.num_tokens_once = int(once.sum())
        is_large = (path - once + subtree > low) & (subtree > once)
        if is_large.sum() > MOST_LARGE_SEGMENTS:
            is_large[:] = False
        large = np.flatnonzero(is_large)
        number = np.cumsum(is_large) - 1
        above = segments.parent[large]
        # Below a segment that fits nobody lies one that does, or not; above it there is none that does.
        self.parent = np.where(above >= 0, number[above], -1).tolist()
        self.tree = (np.searchsorted(roots, large, side="right") - 1).tolist()
        self.alone = alone.tolist()
        self.own, self.path = once[large].tolist(), path[large].tolist()
        self.below = (subtree - once)[large].tolist()

    def total(self, most: int) -> int:
        """Where no rank costs more than `most`."""
        num_ranks = [1] * len(self.own)
        copied = [0] * len(self.own)
        of_tree = self.again.tolist()
        for number in range(len(self.own) - 1, -1, -1):  # parents come first, so children are done
            ranks = max(num_ranks[number], -(-(self.below[number] + copied[number]) // (most - self.path[number])))
            extra = copied[number] + (ranks - 1) * self.own[number]
            parent = self.parent[number]
            if parent >= 0:
                num_ranks[parent] = max(num_ranks[parent], ranks)
                copied[parent] += extra
            elif ranks > 1:
                of_tree[self.tree[number]] = max(of_tree[self.tree[number]], extra + self.alone[self.tree[number]])
        return self.num_tokens_once + sum(of_tree)
