"""First placements of a step's leaves on ranks, from which `local_search` starts.

Trees go whole where they fit: best fit decreasing into ranks of a common capacity, the smallest capacity that works
(MULTIFIT; Coffman, Garey and Johnson, 1978). A tree that fits nowhere is cut into runs of neighbouring leaves that fill
the remaining room; the cost of each run includes the path above it.

A placement is, for each rank, its runs `[begin, end)` of leaves; no run leaves its tree.
"""

from bisect import bisect_left, bisect_right, insort
from heapq import heapify, heapreplace

import numpy as np

from treewise.distributed.placement.leaf_costs import Leaves

Runs = list[list[tuple[int, int]]]

# Capacities tried, as multiples of the lower bound, before the bisection of the last two.
GROWTH = (1.0, 1.01, 1.03, 1.1, 1.25, 1.5, 2.0, 4.0)
NUM_HALVINGS = 6


def lower_bound(leaves: Leaves, num_ranks: int) -> int:
    """Lower bound of the slowest rank's cost: the mean without any cut, and the most expensive path."""
    return max(-(-int(leaves.before[-1]) // num_ranks), int(leaves.path_cost.max()))


def trees_by_cost(leaves: Leaves) -> list[tuple[int, int, int]]:
    """Cost, first leaf and end of each tree, the most expensive first."""
    first = np.flatnonzero(np.diff(leaves.tree, prepend=-1))
    end = np.append(first[1:], len(leaves.tree))
    cost = leaves.before[end] - leaves.before[first]
    order = np.argsort(-cost, kind="stable")
    return list(zip(cost[order].tolist(), first[order].tolist(), end[order].tolist(), strict=True))


def longest_first(leaves: Leaves, num_ranks: int) -> Runs:
    """Whole trees, the most expensive first, each to the least loaded rank (LPT; Graham, 1969)."""
    heap = [(0, rank) for rank in range(num_ranks)]
    heapify(heap)
    runs: Runs = [[] for _ in range(num_ranks)]
    for cost, begin, end in trees_by_cost(leaves):
        load, rank = heap[0]
        heapreplace(heap, (load + cost, rank))
        runs[rank].append((begin, end))
    return runs


def multifit(leaves: Leaves, num_ranks: int) -> Runs:
    """Runs of each rank, for the smallest sufficient capacity that a bisection finds."""
    filler = _Filler(leaves, num_ranks)
    bound = lower_bound(leaves, num_ranks)
    capacities = [int(bound * factor) for factor in GROWTH] + [int(leaves.before[-1])]
    too_small, best = bound - 1, None
    for capacity in capacities:
        best = filler.fill(capacity)
        if best is not None:
            break
        too_small = max(too_small, capacity)
    assert best is not None  # one rank of the last capacity takes everything
    sufficient = capacity
    for _ in range(NUM_HALVINGS):
        middle = (too_small + sufficient) // 2
        if middle in (too_small, sufficient):
            break
        runs = filler.fill(middle)
        if runs is None:
            too_small = middle
        else:
            best, sufficient = runs, middle
    return best


class _Filler:
    def __init__(self, leaves: Leaves, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.trees = trees_by_cost(leaves)
        self.above, self.before = leaves.above.tolist(), leaves.before.tolist()

    def fill(self, capacity: int) -> Runs | None:
        """Runs of each rank with at most this cost, or None if best fit does not find any."""
        self.runs: Runs = [[] for _ in range(self.num_ranks)]
        self.rooms = [(capacity, rank) for rank in range(self.num_ranks)]  # ascending
        waiting = []
        for cost, begin, end in self.trees:
            if cost > capacity:
                if not self._cut(begin, end):
                    return None
            elif not self._fit(cost, begin, end):
                waiting.append((begin, end))
        return self.runs if all(self._cut(begin, end) for begin, end in waiting) else None

    def _fit(self, cost: int, begin: int, end: int) -> bool:
        """Puts a whole run into the smallest sufficient room."""
        index = bisect_left(self.rooms, (cost, -1))
        if index == len(self.rooms):
            return False
        room, rank = self.rooms.pop(index)
        insort(self.rooms, (room - cost, rank))
        self.runs[rank].append((begin, end))
        return True

    def _cut(self, begin: int, end: int) -> bool:
        """Fills the largest room with the beginning of a run, until the rest fits whole."""
        while not self._fit(self.above[begin] + self.before[end] - self.before[begin], begin, end):
            room, rank = self.rooms.pop()
            reach = self.before[begin] + room - self.above[begin]
            stop = bisect_right(self.before, reach, begin, end + 1) - 1
            if stop <= begin:
                return False
            insort(self.rooms, (reach - self.before[stop], rank))
            self.runs[rank].append((begin, stop))
            begin = stop
        return True
