"""Longest first, then moves and swaps: which rank has which leaves, so that the slowest rank is as fast as possible.

Trees go to the least loaded rank, the most expensive first (LPT; Graham, 1969), whole or cut where a rank is full. Then
local search moves a run of leaves, or the beginning or end of one, off the slowest rank, or swaps it, while the slower
of the two ranks gets faster. A run that is cut off recomputes the path above it, unless it meets a run of its own tree
on its new rank. Where no move helps, the slowest rank and two others are shuffled and the search begins again (iterated
local search; Lourenco, Martin and Stützle, 2003), as often as the size of the step allows.
"""

from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from treewise.base.arrays import Ints
from treewise.distributed.placement.leaf_costs import Leaves

# The search ends this close to the lower bound, below what can be measured. Shuffles end where ranks are this even.
GOOD_ENOUGH = 1 / 500
EVEN_ENOUGH = 1 / 200
ROOM = (0.0, 0.1, 0.3)  # of ranks above the least cost, in the placements that the search starts from
NUM_PARTNERS = 24  # least loaded ranks that an exchange is tried with
MAX_SECTIONS = 128  # of the slowest rank, that an exchange is tried with
# Limits of one search: moves, shuffles, shuffles in a row without success, leaves times shuffles. The hardest steps
# take a second or two.
MAX_MOVES, MAX_SHUFFLES, MAX_FAILURES, NUM_SHUFFLED_LEAVES = 5_000, 500, 150, 200_000


def best_owners(leaves: Leaves, extra_load: Ints, at_most: int, start: Ints | None = None) -> Ints:
    """[L] int64, the rank of each leaf; minimises the cost of the slowest rank.

    extra_load: [ranks] int64, cost of each rank that its leaves do not contain. at_most: a cost that is good enough.
    start: [L] int64, owners to start from; None: longest first.
    """
    num_ranks = len(extra_load)
    # Whole trees where that is enough: nothing is recomputed, and where one path takes longest, the rest is even.
    least = max(at_most, int(leaves.path_cost.max()))
    capacities = (None, *(least + int(least * room) for room in ROOM))
    starts = [longest_first(leaves, num_ranks, capacity) for capacity in capacities] if start is None else [start]
    moves_left = MAX_MOVES

    def improved(owners: Ints) -> tuple[tuple[int, int], Ints, Ints]:
        """Slowest rank and the number of ranks within 0.1 % of it, because one of several slow ranks made faster is
        progress; owners; loads.
        """
        nonlocal moves_left
        search = _Search(leaves, owners, extra_load)
        while moves_left > 0 and search.loads.max() > at_most and search.improve_slowest():
            moves_left -= 1
        loads = loads_of(leaves, search.owners, num_ranks) + extra_load
        slowest = int(loads.max())
        return (slowest, int((loads >= slowest - slowest // 1000).sum())), search.owners, loads

    best = improved(starts[0])
    for each in starts[1:]:
        if best[0][0] > at_most:
            best = min(best, improved(each), key=lambda found: found[0])
    rng, num_failures = np.random.default_rng(0), 0
    for _ in range(min(MAX_SHUFFLES, NUM_SHUFFLED_LEAVES // len(leaves.new))):
        (slowest, _), owners, loads = best
        if slowest <= at_most or is_even(loads) or moves_left <= 0 or num_failures >= MAX_FAILURES:
            break
        found = improved(_shuffled(leaves, owners, loads, rng))
        num_failures = 0 if found[0] < best[0] else num_failures + 1
        best = min(best, found, key=lambda each: each[0])
    return best[1]


def longest_first(leaves: Leaves, num_ranks: int, capacity: int | None = None) -> Ints:
    """[L] int64, the rank of each leaf: trees, the most expensive first, each to the least loaded rank.

    capacity: where a tree does not fit, the beginning of it that does goes there, and the rest on to the next rank; at
    least the cost of every path. None: trees stay whole.
    """
    above, before = leaves.above, leaves.before
    first = np.flatnonzero(leaves.starts_tree())
    end = np.append(first[1:], len(leaves.new))
    owners = np.empty(len(leaves.new), dtype=np.int64)
    heap = [(0, rank) for rank in range(num_ranks)]
    for tree in np.argsort(before[first] - before[end], kind="stable").tolist():
        begin, last = int(first[tree]), int(end[tree])
        while begin < last:
            load, rank = heap[0]
            stop = last
            if capacity is not None and load + above[begin] + before[last] - before[begin] > capacity:
                reach = before[begin] + capacity - load - above[begin]
                fitting = int(np.searchsorted(before[begin : last + 1], reach, side="right")) - 1 + begin
                stop = fitting if fitting > begin else last  # no rank has room: the least loaded one takes the rest
            owners[begin:stop] = rank
            heapreplace(heap, (load + int(above[begin] + before[stop] - before[begin]), rank))
            begin = stop
    return owners


def _shuffled(leaves: Leaves, owners: Ints, loads: Ints, rng: np.random.Generator) -> Ints:
    """Owners where the runs of the slowest rank and up to two others are dealt out again at random."""
    chosen = np.unique(np.append(rng.integers(0, len(loads), 2), int(loads.argmax())))
    shuffled = owners.copy()
    for rank, begin, end in _runs_of(leaves, owners):
        if rank in chosen:
            cut = int(rng.integers(begin, end + 1))
            shuffled[begin:cut], shuffled[cut:end] = rng.choice(chosen, 2)
    return shuffled


def is_even(loads: Ints) -> bool:
    """Whether the slowest rank is hardly above the mean. loads: [ranks] int64."""
    return int(loads.max()) * len(loads) <= int(loads.sum() * (1 + EVEN_ENOUGH))


def _runs_of(leaves: Leaves, owners: Ints) -> list[tuple[int, int, int]]:
    """Rank, begin and end of each run."""
    begins = np.flatnonzero(np.append(True, (np.diff(owners) != 0) | (np.diff(leaves.tree) != 0)))
    ends = np.append(begins[1:], len(owners))
    return list(zip(owners[begins].tolist(), begins.tolist(), ends.tolist(), strict=True))


def loads_of(leaves: Leaves, owners: Ints, num_ranks: int) -> Ints:
    """[ranks] int64, the cost of each rank: the union of its leaves' paths. owners: [L] int64."""
    order = np.lexsort((leaves.tree, owners))  # stable, so leaves of one rank and tree stay in order
    rank, tree = owners[order], leaves.tree[order]
    is_same_tree = (rank[1:] == rank[:-1]) & (tree[1:] == tree[:-1])
    cost = leaves.path_cost[order]
    cost[1:] -= np.where(is_same_tree, leaves.above[order[1:]], 0)
    for index in np.flatnonzero(is_same_tree & (np.diff(order) > 1)).tolist():  # a rank with a gap in a tree: rare
        last, leaf = int(order[index]), int(order[index + 1])
        cost[index + 1] = leaves.path_cost[leaf] - min(leaves.above[leaf], leaves.dip[last + 1 : leaf].min())
    loads = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(loads, rank, cost)
    return loads


@dataclass(frozen=True, slots=True)
class _Move:
    """Leaves `section` go from the slowest rank to `partner`, and the run `back`, if any, the other way.

    load: of the slower of the two ranks afterwards.
    """

    load: int
    section: tuple[int, int]
    partner: int
    back: tuple[int, int] | None = None


class _Sections(NamedTuple):
    """Runs that a rank may give away, [n] int64 each: begin and end; loss: what the rank saves; gain: what another rank
    computes more."""

    begin: Ints
    end: Ints
    loss: Ints
    gain: Ints


class _Search:
    """Runs per rank, their loads, and the owner of each leaf; two runs of a rank never touch within a tree."""

    def __init__(self, leaves: Leaves, owners: Ints, extra_load: Ints) -> None:
        self.extra_load, self.owners = extra_load, owners.copy()
        self.above, self.before, self.tree = leaves.above, leaves.before, leaves.tree
        self.runs: list[list[tuple[int, int]]] = [[] for _ in extra_load]
        for rank, begin, end in _runs_of(leaves, owners):
            self.runs[rank].append((begin, end))
        self.loads = np.array([self._load(rank) for rank in range(len(extra_load))], dtype=np.int64)

    def improve_slowest(self) -> bool:
        """Makes the best move from the slowest rank; False if no move makes the slower of the two ranks faster."""
        rank = int(self.loads.argmax())
        sections = self._sections(rank)
        moves = [*self._neighbour_transfers(rank), self._best_exchange(rank, sections)]
        if (least := int(self.loads.argmin())) != rank:
            moves.insert(0, self._transfer(rank, least, sections))
        best = min((move for move in moves if move is not None), key=lambda each: each.load, default=None)
        if best is None or best.load >= self.loads[rank]:
            return False
        self._take(rank, *best.section)
        if best.back is not None:
            self._take(best.partner, *best.back)
            self._give(rank, *best.back)
        self._give(best.partner, *best.section)
        for changed in (rank, best.partner):
            self.loads[changed] = self._load(changed)
        return True

    # -- moves ------------------------------------------------------------------------------------------------------

    def _sections(self, rank: int) -> _Sections:
        """All runs of a rank, and all beginnings and ends of them."""
        begins, ends = list[Ints](), list[Ints]()
        for begin, end in self.runs[rank]:
            inner = np.arange(begin + 1, end)
            begins += [np.array([begin]), inner, np.full(len(inner), begin)]
            ends += [np.array([end]), np.full(len(inner), end), inner]
        first, last = np.concatenate(begins), np.concatenate(ends)
        runs: Ints = np.array(self.runs[rank])
        run = runs[np.searchsorted(runs[:, 0], first, side="right") - 1]
        gain = self.above[first] + self.before[last] - self.before[first]
        # Without its end a run saves the new tokens only; without its beginning the rest recomputes the path above it.
        loss = gain - np.where(first > run[:, 0], self.above[first], 0)
        loss -= np.where(last < run[:, 1], self.above[np.minimum(last, len(self.above) - 1)], 0)
        return _Sections(first, last, loss, gain)

    def _neighbour_transfers(self, rank: int) -> list[_Move | None]:
        """Sections for the ranks of the leaves beside a run, which compute the path above already."""
        moves: list[_Move | None] = []
        for begin, end in self.runs[rank]:
            if end < len(self.tree) and self.tree[end] == self.tree[begin]:
                cut = np.arange(begin, end)
                loss = self.before[end] - self.before[cut] + np.where(cut == begin, self.above[begin], 0)
                gain = self.above[cut] + self.before[end] - self.before[cut] - self.above[end]
                sections = _Sections(cut, np.full_like(cut, end), loss, gain)
                moves.append(self._transfer(rank, int(self.owners[end]), sections))
            if begin > 0 and self.tree[begin - 1] == self.tree[begin]:
                cut = np.arange(begin + 1, end + 1)
                rest = np.where(cut < end, self.above[np.minimum(cut, len(self.above) - 1)], 0)
                gain = self.before[cut] - self.before[begin]
                sections = _Sections(np.full_like(cut, begin), cut, self.above[begin] + gain - rest, gain)
                moves.append(self._transfer(rank, int(self.owners[begin - 1]), sections))
        return moves

    def _transfer(self, rank: int, partner: int, sections: _Sections) -> _Move:
        """The best of some sections for one partner."""
        after: Ints = np.maximum(self.loads[rank] - sections.loss, self.loads[partner] + sections.gain)
        best = int(after.argmin())
        return _Move(int(after[best]), (int(sections.begin[best]), int(sections.end[best])), partner)

    def _best_exchange(self, rank: int, sections: _Sections) -> _Move | None:
        """A section for a run of one of the least loaded ranks."""
        begin, end, loss, gain = sections
        if len(begin) > MAX_SECTIONS:
            chosen = np.argsort(-loss, kind="stable")[np.linspace(0, len(begin) - 1, MAX_SECTIONS).astype(np.int64)]
            begin, end, loss, gain = begin[chosen], end[chosen], loss[chosen], gain[chosen]
        partners: list[int] = np.argsort(self.loads, kind="stable")[:NUM_PARTNERS].tolist()
        runs = [(partner, *run) for partner in partners if partner != rank for run in self.runs[partner]]
        if not runs:
            return None
        columns: Ints = np.array(runs)
        partner, first, last = columns[:, 0], columns[:, 1], columns[:, 2]
        back = self.above[first] + self.before[last] - self.before[first]
        load_of_rank = (self.loads[rank] - loss)[:, None] + back
        load_of_partner = gain[:, None] + (self.loads[partner] - back)
        after: Ints = np.maximum(load_of_rank, load_of_partner)
        row, column = divmod(int(after.argmin()), after.shape[1])
        section, run = (int(begin[row]), int(end[row])), (int(first[column]), int(last[column]))
        return _Move(int(after[row, column]), section, int(partner[column]), run)

    # -- runs -------------------------------------------------------------------------------------------------------

    def _load(self, rank: int) -> int:
        load = sum(self.above[begin] + self.before[end] - self.before[begin] for begin, end in self.runs[rank])
        return int(load + self.extra_load[rank])

    def _take(self, rank: int, begin: int, end: int) -> None:
        runs = self.runs[rank]
        index = next(index for index, run in enumerate(runs) if run[0] <= begin and end <= run[1])
        first, last = runs.pop(index)
        runs[index:index] = [run for run in ((first, begin), (end, last)) if run[0] < run[1]]

    def _give(self, rank: int, begin: int, end: int) -> None:
        self.owners[begin:end] = rank
        runs = self.runs[rank]
        for run in list(runs):
            if self.tree[run[0]] == self.tree[begin] and (run[1] == begin or run[0] == end):
                runs.remove(run)
                begin, end = min(begin, run[0]), max(end, run[1])
        runs.append((begin, end))
        runs.sort()
