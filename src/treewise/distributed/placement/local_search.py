"""Local search: moves leaves off the slowest rank, or swaps them, while the slower of the two ranks gets faster.

A move takes a run of leaves, or the beginning or end of one. A run that is cut off recomputes the path above it, unless
it meets a run of its own tree on its new rank. Where no move helps, the slowest rank and two others are shuffled and
the search begins again (iterated local search; Lourenco, Martin and Stützle, 2003), as often as the size of the step
allows. Small steps are also searched exhaustively.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treewise.distributed.placement.leaf_costs import Leaves
from treewise.distributed.placement.multifit import Runs, longest_first, lower_bound, multifit

# The search ends this close to the lower bound, below what can be measured. Shuffles end where ranks are this even.
GOOD_ENOUGH = 1 / 500
EVEN_ENOUGH = 1 / 200
NUM_PARTNERS = 24  # least loaded ranks that an exchange is tried with
MAX_SECTIONS = 128  # of the slowest rank, that an exchange is tried with
# Limits of one search: moves, shuffles (of the first search, and of a search from known owners), shuffles in a row
# without success, leaves times shuffles. The hardest steps take a second or two.
MAX_MOVES = 5_000
MAX_SHUFFLES, MAX_LATER_SHUFFLES = 500, 400
MAX_FAILURES = 100
NUM_SHUFFLED_LEAVES = 200_000
NUM_EXHAUSTIVE_LEAVES = 20
NUM_EXHAUSTIVE_STEPS = 30_000


def best_owners(leaves: Leaves, num_ranks: int) -> np.ndarray:
    """[L] int64, the rank of each leaf; minimises the time of the slowest rank."""
    bound = lower_bound(leaves, num_ranks)
    at_most = bound + int(bound * GOOD_ENOUGH)
    search = _RepeatedSearch(leaves, np.zeros(num_ranks, dtype=np.int64), at_most)
    # Whole trees where that is enough: nothing is recomputed, and where one path takes longest, the rest is even.
    best = search.improve(longest_first(leaves, num_ranks), max_moves=0)
    for start in (multifit, longest_first):
        if best.slowest > at_most:
            best = min(best, search.improve(start(leaves, num_ranks)))
    if best.slowest > at_most and len(leaves.new) <= NUM_EXHAUSTIVE_LEAVES:
        exhaustive = _Exhaustive(leaves, num_ranks, best.owners, best.slowest, at_most)
        if exhaustive.steps_left:
            return exhaustive.owners  # optimal
        best = search.evaluate(exhaustive.owners)
    return search.shuffle(best, MAX_SHUFFLES).owners


def improve_owners(leaves: Leaves, owners: np.ndarray, extra_load: np.ndarray, at_most: int) -> np.ndarray:
    """[L] int64, the rank of each leaf after a search that starts from `owners` ([L] int64).

    extra_load: [ranks] int64, cost of each rank that its leaves do not contain.
    """
    search = _RepeatedSearch(leaves, extra_load, at_most)
    best = search.improve(_as_runs(leaves, owners, len(extra_load)))
    return search.shuffle(best, MAX_LATER_SHUFFLES).owners


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A placement. num_slow: ranks within 0.1 % of the slowest, because one of several slow ranks made faster is
    progress. is_even: the slowest rank is hardly above the mean.
    """

    owners: np.ndarray
    slowest: int
    num_slow: int
    is_even: bool

    def __lt__(self, other: "_Candidate") -> bool:
        return (self.slowest, self.num_slow) < (other.slowest, other.num_slow)


class _RepeatedSearch:
    """Local searches and shuffles, until the slowest rank is at `at_most` or no moves are left."""

    def __init__(self, leaves: Leaves, extra_load: np.ndarray, at_most: int) -> None:
        self.leaves, self.extra_load, self.at_most = leaves, extra_load, at_most
        self.moves_left = MAX_MOVES

    def evaluate(self, owners: np.ndarray) -> _Candidate:
        loads = self.loads(owners)
        slowest = int(loads.max())
        num_slow = int((loads >= slowest - slowest // 1000).sum())
        return _Candidate(owners, slowest, num_slow, is_even(loads))

    def loads(self, owners: np.ndarray) -> np.ndarray:
        return loads_of(self.leaves, owners, len(self.extra_load)) + self.extra_load

    def improve(self, runs: Runs, max_moves: int | None = None) -> _Candidate:
        limit = self.moves_left if max_moves is None else max_moves
        owners, num_moves = local_search(self.leaves, runs, self.at_most, limit, self.extra_load)
        self.moves_left -= num_moves
        return self.evaluate(owners)

    def shuffle(self, best: _Candidate, max_shuffles: int) -> _Candidate:
        """Shuffles and searches again until the result is good or no longer improves."""
        rng = np.random.default_rng(0)
        num_failures = 0
        for _ in range(min(max_shuffles, NUM_SHUFFLED_LEAVES // len(self.leaves.new))):
            is_done = best.slowest <= self.at_most or best.is_even
            if is_done or self.moves_left <= 0 or num_failures >= MAX_FAILURES:
                break
            candidate = self.improve(self._shuffled_runs(best.owners, rng))
            num_failures = 0 if candidate < best else num_failures + 1
            best = min(best, candidate)
        return best

    def _shuffled_runs(self, owners: np.ndarray, rng: np.random.Generator) -> Runs:
        """Runs in which those of the slowest rank and up to two others are dealt out again at random."""
        num_ranks = len(self.extra_load)
        slowest = int(self.loads(owners).argmax())
        chosen = np.unique(np.append(rng.integers(0, num_ranks, 2), slowest))
        runs: Runs = [[] for _ in range(num_ranks)]
        for rank, begin, end in _runs_of(self.leaves, owners):
            if rank not in chosen:
                runs[rank].append((begin, end))
                continue
            cut = int(rng.integers(begin, end + 1))
            for section in ((begin, cut), (cut, end)):
                if section[0] < section[1]:
                    runs[int(rng.choice(chosen))].append(section)
        return runs


def is_even(loads: np.ndarray) -> bool:
    """Whether the slowest rank is hardly above the mean. loads: [ranks] int64."""
    return int(loads.max()) * len(loads) <= int(loads.sum() * (1 + EVEN_ENOUGH))


def _as_runs(leaves: Leaves, owners: np.ndarray, num_ranks: int) -> Runs:
    runs: Runs = [[] for _ in range(num_ranks)]
    for rank, begin, end in _runs_of(leaves, owners):
        runs[rank].append((begin, end))
    return runs


def _runs_of(leaves: Leaves, owners: np.ndarray) -> list[tuple[int, int, int]]:
    """Rank, begin and end of each run."""
    begins = np.flatnonzero(np.append(True, (np.diff(owners) != 0) | (np.diff(leaves.tree) != 0)))
    ends = np.append(begins[1:], len(owners))
    return list(zip(owners[begins].tolist(), begins.tolist(), ends.tolist(), strict=True))


def loads_of(leaves: Leaves, owners: np.ndarray, num_ranks: int) -> np.ndarray:
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


def local_search(
    leaves: Leaves, runs: Runs, at_most: int, max_moves: int = MAX_MOVES, extra_load: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """Owners ([L] int64) after local search from a first placement, and the number of moves.

    Ends where no move helps, where the slowest rank is at `at_most`, or after `max_moves`. extra_load: [ranks] int64,
    cost of each rank that its leaves do not contain.
    """
    search = _Search(leaves, runs, np.zeros(len(runs), dtype=np.int64) if extra_load is None else extra_load)
    num_moves = 0
    while num_moves < max_moves and search.loads.max() > at_most and search.improve_slowest():
        num_moves += 1
    return search.owners, num_moves


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

    begin: np.ndarray
    end: np.ndarray
    loss: np.ndarray
    gain: np.ndarray


class _Search:
    """Runs per rank, their loads, and the owner of each leaf; two runs of a rank never touch within a tree."""

    def __init__(self, leaves: Leaves, runs: Runs, extra_load: np.ndarray) -> None:
        self.extra_load = extra_load.tolist()
        self.above, self.before, self.tree = leaves.above, leaves.before, leaves.tree
        self.owners = np.empty(len(leaves.new), dtype=np.int64)
        self.runs: Runs = [[] for _ in runs]
        for rank, runs_of_rank in enumerate(runs):
            for begin, end in sorted(runs_of_rank):
                self._give(rank, begin, end)
        self.loads = np.array([self._load(rank) for rank in range(len(runs))], dtype=np.int64)

    def improve_slowest(self) -> bool:
        """Makes the best move from the slowest rank; False if no move makes the slower of the two ranks faster."""
        rank = int(self.loads.argmax())
        sections = self._sections(rank)
        best = self._best_transfer(rank, sections)
        for move in (*self._neighbour_transfers(rank), self._best_exchange(rank, sections)):
            if move is not None and (best is None or move.load < best.load):
                best = move
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
        begins, ends = [], []
        for begin, end in self.runs[rank]:
            inner = np.arange(begin + 1, end)
            begins += [np.array([begin]), inner, np.full(len(inner), begin)]
            ends += [np.array([end]), np.full(len(inner), end), inner]
        first, last = np.concatenate(begins), np.concatenate(ends)
        runs = np.array(self.runs[rank])
        run = runs[np.searchsorted(runs[:, 0], first, side="right") - 1]
        gain = self.above[first] + self.before[last] - self.before[first]
        is_end, is_begin = (first > run[:, 0]), (last < run[:, 1])
        # Without its end a run saves the new tokens only; without its beginning the rest recomputes the path above it.
        loss = gain - np.where(is_end, self.above[first], 0)
        loss -= np.where(is_begin, self.above[np.minimum(last, len(self.above) - 1)], 0)
        return _Sections(first, last, loss, gain)

    def _best_transfer(self, rank: int, sections: _Sections) -> _Move | None:
        """A section for the least loaded rank."""
        partner = int(self.loads.argmin())
        return None if partner == rank else self._transfer(rank, partner, sections)

    def _neighbour_transfers(self, rank: int) -> list[_Move]:
        """Sections for the ranks of the leaves beside a run, which compute the path above already."""
        moves = []
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
                loss = self.above[begin] + gain - rest
                sections = _Sections(np.full_like(cut, begin), cut, loss, gain)
                moves.append(self._transfer(rank, int(self.owners[begin - 1]), sections))
        return moves

    def _transfer(self, rank: int, partner: int, sections: _Sections) -> _Move:
        """The best of some sections for one partner."""
        after = np.maximum(self.loads[rank] - sections.loss, self.loads[partner] + sections.gain)
        best = int(after.argmin())
        return _Move(int(after[best]), (int(sections.begin[best]), int(sections.end[best])), partner)

    def _best_exchange(self, rank: int, sections: _Sections) -> _Move | None:
        """A section for a run of one of the least loaded ranks."""
        begin, end, loss, gain = sections
        if len(begin) > MAX_SECTIONS:
            chosen = np.argsort(-loss, kind="stable")[np.linspace(0, len(begin) - 1, MAX_SECTIONS).astype(np.int64)]
            begin, end, loss, gain = begin[chosen], end[chosen], loss[chosen], gain[chosen]
        partners = np.argsort(self.loads, kind="stable")[:NUM_PARTNERS].tolist()
        runs = [(partner, *run) for partner in partners if partner != rank for run in self.runs[partner]]
        if not runs:
            return None
        partner, first, last = np.array(runs).T
        back = self.above[first] + self.before[last] - self.before[first]
        load_of_rank = (self.loads[rank] - loss)[:, None] + back
        load_of_partner = gain[:, None] + (self.loads[partner] - back)
        after = np.maximum(load_of_rank, load_of_partner)
        row, column = divmod(int(after.argmin()), after.shape[1])
        section, run = (int(begin[row]), int(end[row])), (int(first[column]), int(last[column]))
        return _Move(int(after[row, column]), section, int(partner[column]), run)

    # -- runs -------------------------------------------------------------------------------------------------------

    def _load(self, rank: int) -> int:
        load = sum(self.above[begin] + self.before[end] - self.before[begin] for begin, end in self.runs[rank])
        return int(load) + self.extra_load[rank]

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


class _Exhaustive:
    """Branch and bound over all placements of a few leaves, for a limited number of steps."""

    def __init__(self, leaves: Leaves, num_ranks: int, owners: np.ndarray, load: int, at_most: int) -> None:
        self.owners, self.load, self.at_most = owners, load, at_most
        self.path_cost, self.above, self.tree = leaves.path_cost.tolist(), leaves.above.tolist(), leaves.tree.tolist()
        self.dip = leaves.dip.tolist()
        self.rest = (leaves.before[-1] - leaves.before).tolist()  # cost of the leaves from each on, if nothing is cut
        self.loads, self.last = [0] * num_ranks, [-1] * num_ranks
        self.chosen = [0] * len(leaves.new)
        self.steps_left = NUM_EXHAUSTIVE_STEPS
        self._descend(0)

    def _descend(self, leaf: int) -> None:
        if self.steps_left == 0 or self.load <= self.at_most:
            return
        self.steps_left -= 1
        if leaf == len(self.path_cost):
            self.load, self.owners = max(self.loads), np.array(self.chosen, dtype=np.int64)
            return
        if sum(self.loads) + self.rest[leaf] >= self.load * len(self.loads):
            return
        options = sorted((self.loads[rank] + self._cost(leaf, rank), rank) for rank in self._distinct_ranks(leaf))
        for load, rank in options:
            if load >= self.load:
                break
            saved = self.loads[rank], self.last[rank]
            self.loads[rank], self.last[rank], self.chosen[leaf] = load, leaf, rank
            self._descend(leaf + 1)
            self.loads[rank], self.last[rank] = saved

    def _cost(self, leaf: int, rank: int) -> int:
        """What a leaf adds to a rank that has some earlier leaves."""
        last = self.last[rank]
        if last < 0 or self.tree[last] != self.tree[leaf]:
            return int(self.path_cost[leaf])
        return int(self.path_cost[leaf] - min([self.above[leaf], *self.dip[last + 1 : leaf]]))

    def _distinct_ranks(self, leaf: int) -> list[int]:
        """One rank of each state."""
        seen: dict[tuple[int, int], int] = {}
        for rank, load in enumerate(self.loads):
            last = self.last[rank]
            state = (load, last if last >= 0 and self.tree[last] == self.tree[leaf] else -1)
            seen.setdefault(state, rank)
        return list(seen.values())
