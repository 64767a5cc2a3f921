"""First placements of a step's leaves on ranks, which `search` then improves.

Trees go whole where they fit: best fit decreasing into ranks of a common capacity, the smallest capacity that works
(MULTIFIT; Coffman, Garey and Johnson, 1978). What fits nowhere is cut into runs of neighbouring leaves that fill what
room is left; each run computes the path above it again, and is charged for it.

A placement is, for each rank, its runs `[begin, end)` of leaves; no run leaves its tree.
"""

from bisect import bisect_left, bisect_right, insort
from heapq import heapify, heapreplace

import numpy as np

from treewise.distributed.placement.leaf_costs import Leaves

Runs = list[list[tuple[int, int]]]

# Capacities tried, as shares of the lower bound, before the search between the last two begins.
GROWTH = (1.0, 1.01, 1.03, 1.1, 1.25, 1.5, 2.0, 4.0)
NUM_HALVINGS = 6


def lower_bound(leaves: Leaves, num_ranks: int) -> int:
    """No placement has a slowest rank below this: the mean without any cut, and the most costly single path."""
    return max(-(-int(leaves.below[-1]) // num_ranks), int(leaves.path.max()))


def trees_by_cost(leaves: Leaves) -> list[tuple[int, int, int]]:
    """Cost, first leaf and end of each tree, the most costly first."""
    first = np.flatnonzero(np.diff(leaves.tree, prepend=-1))
    end = np.append(first[1:], len(leaves.tree))
    cost = leaves.below[end] - leaves.below[first]
    order = np.argsort(-cost, kind="stable")
    return list(zip(cost[order].tolist(), first[order].tolist(), end[order].tolist(), strict=True))


def longest_first(leaves: Leaves, num_ranks: int) -> Runs:
    """Whole trees, the most costly first, each to the rank with the least so far (LPT; Graham, 1969)."""
    heap = [(0, rank) for rank in range(num_ranks)]
    heapify(heap)
    runs: Runs = [[] for _ in range(num_ranks)]
    for cost, begin, end in trees_by_cost(leaves):
        load, rank = heap[0]
        heapreplace(heap, (load + cost, rank))
        runs[rank].append((begin, end))
    return runs


def multifit(leaves: Leaves, num_ranks: int) -> Runs:
    """Runs in ranks of the smallest capacity that a search finds to be enough."""
    filler = _Filler(leaves, num_ranks)
    bound = lower_bound(leaves, num_ranks)
    capacities = [int(bound * share) for share in GROWTH] + [int(leaves.below[-1])]
    too_small, found = bound - 1, None
    for capacity in capacities:
        found = filler.fill(capacity)
        if found is not None:
            break
        too_small = max(too_small, capacity)
    assert found is not None  # one rank of the last capacity takes everything
    enough = capacity
    for _ in range(NUM_HALVINGS):
        middle = (too_small + enough) // 2
        if middle in (too_small, enough):
            break
        tried = filler.fill(middle)
        if tried is None:
            too_small = middle
        else:
            found, enough = tried, middle
    return found


class _Filler:
    def __init__(self, leaves: Leaves, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.trees = trees_by_cost(leaves)
        self.again, self.below = leaves.again.tolist(), leaves.below.tolist()

    def fill(self, capacity: int) -> Runs | None:
        """Everything in ranks of at most this capacity, or None where this rule finds no way."""
        self.runs: Runs = [[] for _ in range(self.num_ranks)]
        self.rooms = [(capacity, rank) for rank in range(self.num_ranks)]  # ascending
        waiting = []
        for cost, begin, end in self.trees:
            if cost > capacity:
                if not self._cut(begin, end):
                    return None
            elif not self._place(cost, begin, end):
                waiting.append((begin, end))
        return self.runs if all(self._cut(begin, end) for begin, end in waiting) else None

    def _place(self, cost: int, begin: int, end: int) -> bool:
        """A run, whole, into the smallest room that takes it."""
        place = bisect_left(self.rooms, (cost, -1))
        if place == len(self.rooms):
            return False
        room, rank = self.rooms.pop(place)
        insort(self.rooms, (room - cost, rank))
        self.runs[rank].append((begin, end))
        return True

    def _cut(self, begin: int, end: int) -> bool:
        """A run in parts: as much as the largest room takes, until the rest fits whole."""
        while not self._place(self.again[begin] + self.below[end] - self.below[begin], begin, end):
            room, rank = self.rooms.pop()
            reach = self.below[begin] + room - self.again[begin]
            stop = bisect_right(self.below, reach, begin, end + 1) - 1
            if stop <= begin:
                return False
            insort(self.rooms, (reach - self.below[stop], rank))
            self.runs[rank].append((begin, stop))
            begin = stop
        return True
