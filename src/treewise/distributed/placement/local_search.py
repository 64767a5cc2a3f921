"""Placements improved: the slowest rank gives something away, or exchanges it, as long as that makes both faster.

What may move is a run of leaves, or the beginning or end of one. What is cut off pays for the path above it; what
comes to lie beside a run of its own tree on its new rank pays less. Where no move helps, the slowest rank and two
others are shuffled and the search begins again (iterated local search; Lourenco, Martin and Stützle, 2003), as often
as the size of the step allows. Small steps are searched exhaustively besides.
"""

from dataclasses import dataclass

import numpy as np

from treewise.distributed.placement.leaf_costs import Leaves
from treewise.distributed.placement.multifit import Runs, longest_first, lower_bound, multifit

# The search ends this close to the lower bound: nobody can measure less. Shuffles end where ranks are this even.
GOOD_ENOUGH = 1 / 500
EVEN_ENOUGH = 1 / 200
NUM_PARTNERS = 24  # least loaded ranks that an exchange is tried with
MAX_PIECES = 128  # of the slowest rank, that an exchange is tried with
# Limits of one search: moves, shuffles (and of one that begins with owners found before), shuffles without any success,
# leaves times shuffles. A second or two for the hardest steps.
MOST_MOVES = 5_000
MAX_SHUFFLES, MAX_LATER_SHUFFLES = 500, 400
MAX_IN_VAIN = 100
NUM_SHUFFLED_LEAVES = 200_000
NUM_EXHAUSTIVE_LEAVES = 20
NUM_EXHAUSTIVE_STEPS = 30_000


def best_owners(leaves: Leaves, num_ranks: int) -> np.ndarray:
    """[L] int64, the rank of each leaf, so that the slowest rank is as fast as this search finds."""
    bound = lower_bound(leaves, num_ranks)
    at_most = bound + int(bound * GOOD_ENOUGH)
    goal = _Goal(leaves, np.zeros(num_ranks, dtype=np.int64), at_most)
    # Whole trees where that will do: nothing is computed twice, and where one path takes longest, the rest is even.
    best = goal.improved(longest_first(leaves, num_ranks), most_moves=0)
    for start in (multifit, longest_first):
        if best.slowest > at_most:
            best = min(best, goal.improved(start(leaves, num_ranks)))
    if best.slowest > at_most and len(leaves.new) <= NUM_EXHAUSTIVE_LEAVES:
        exhaustive = _Exhaustive(leaves, num_ranks, best.owners, best.slowest, at_most)
        if exhaustive.steps_left:
            return exhaustive.owners  # nothing is left to find
        best = goal.scored(exhaustive.owners)
    return goal.shuffled(best, MAX_SHUFFLES).owners


def better_owners(leaves: Leaves, owners: np.ndarray, beside: np.ndarray, at_most: int) -> np.ndarray:
    """[L] int64, owners from which the slowest rank becomes faster by the same search.

    beside: [ranks] int64, what each rank costs besides its leaves.
    """
    goal = _Goal(leaves, beside, at_most)
    best = goal.improved(_as_runs(leaves, owners, len(beside)))
    return goal.shuffled(best, MAX_LATER_SHUFFLES).owners


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Owners; the slowest rank; how many are nearly as slow: one of several slow ranks made faster is progress.

    is_even: the slowest is hardly above the mean.
    """

    owners: np.ndarray
    slowest: int
    num_slow: int
    is_even: bool

    def __lt__(self, other: "_Found") -> bool:
        return (self.slowest, self.num_slow) < (other.slowest, other.num_slow)


class _Goal:
    """Placements of some leaves, compared by their slowest rank, until one is at `at_most` or moves run out."""

    def __init__(self, leaves: Leaves, beside: np.ndarray, at_most: int) -> None:
        self.leaves, self.beside, self.at_most = leaves, beside, at_most
        self.moves_left = MOST_MOVES

    def scored(self, owners: np.ndarray) -> _Found:
        loads = self.loads(owners)
        slowest = int(loads.max())
        num_slow = int((loads >= slowest - slowest // 1000).sum())
        return _Found(owners, slowest, num_slow, is_even(loads))

    def loads(self, owners: np.ndarray) -> np.ndarray:
        return loads_of(self.leaves, owners, len(self.beside)) + self.beside

    def improved(self, runs: Runs, most_moves: int | None = None) -> _Found:
        most = self.moves_left if most_moves is None else most_moves
        owners, num_moves = improved(self.leaves, runs, self.at_most, most, self.beside)
        self.moves_left -= num_moves
        return self.scored(owners)

    def shuffled(self, best: _Found, most_shuffles: int) -> _Found:
        """Shuffles and searches again, until nothing better has come for long."""
        rng = np.random.default_rng(0)
        num_in_vain = 0
        for _ in range(min(most_shuffles, NUM_SHUFFLED_LEAVES // len(self.leaves.new))):
            is_done = best.slowest <= self.at_most or best.is_even
            if is_done or self.moves_left <= 0 or num_in_vain >= MAX_IN_VAIN:
                break
            tried = self.improved(self._shuffle(best.owners, rng))
            num_in_vain = 0 if tried < best else num_in_vain + 1
            best = min(best, tried)
        return best

    def _shuffle(self, owners: np.ndarray, rng: np.random.Generator) -> Runs:
        """The slowest rank and up to two others shuffled, the rest as it is."""
        num_ranks = len(self.beside)
        slowest = int(self.loads(owners).argmax())
        chosen = np.unique(np.append(rng.integers(0, num_ranks, 2), slowest))
        runs: Runs = [[] for _ in range(num_ranks)]
        for rank, begin, end in _runs_of(self.leaves, owners):
            if rank not in chosen:
                runs[rank].append((begin, end))
                continue
            cut = int(rng.integers(begin, end + 1))
            for part in ((begin, cut), (cut, end)):
                if part[0] < part[1]:
                    runs[int(rng.choice(chosen))].append(part)
        return runs


def is_even(loads: np.ndarray) -> bool:
    """The slowest rank is hardly above the mean of all."""
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
    """[ranks] int64, the cost of each rank: of the union of its leaves' paths."""
    order = np.lexsort((leaves.tree, owners))  # stable, so leaves of one rank and tree stay in order
    rank, tree = owners[order], leaves.tree[order]
    goes_on = (rank[1:] == rank[:-1]) & (tree[1:] == tree[:-1])
    cost = leaves.path[order]
    cost[1:] -= np.where(goes_on, leaves.again[order[1:]], 0)
    for place in np.flatnonzero(goes_on & (np.diff(order) > 1)).tolist():  # a rank with a gap in a tree: rare
        before, leaf = int(order[place]), int(order[place + 1])
        cost[place + 1] = leaves.path[leaf] - min(leaves.again[leaf], leaves.dip[before + 1 : leaf].min())
    loads = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(loads, rank, cost)
    return loads


def improved(
    leaves: Leaves, runs: Runs, at_most: int, most_moves: int = MOST_MOVES, beside: np.ndarray | None = None
) -> tuple[np.ndarray, int]:
    """Owners after local search from a first placement ([L] int64), and the number of moves that it took.

    Ends where no move helps, where the slowest rank is at `at_most`, or after `most_moves`. beside: [ranks] int64, what
    each rank costs besides its leaves.
    """
    search = _Search(leaves, runs, np.zeros(len(runs), dtype=np.int64) if beside is None else beside)
    num_moves = 0
    while num_moves < most_moves and search.loads.max() > at_most and search.improve_slowest():
        num_moves += 1
    return search.owners, num_moves


@dataclass(frozen=True, slots=True)
class _Move:
    """Leaves `piece` go from the slowest rank to `partner`, and the run `back`, if any, the other way."""

    load: int  # of the slower of the two afterwards
    piece: tuple[int, int]
    partner: int
    back: tuple[int, int] | None = None


class _Search:
    """Runs per rank, their loads, and the owner of each leaf; two runs of a rank never touch within a tree."""

    def __init__(self, leaves: Leaves, runs: Runs, beside: np.ndarray) -> None:
        self.beside = beside.tolist()
        self.again, self.below, self.tree = leaves.again, leaves.below, leaves.tree
        self.owners = np.empty(len(leaves.new), dtype=np.int64)
        self.runs: Runs = [[] for _ in runs]
        for rank, own in enumerate(runs):
            for begin, end in sorted(own):
                self._give(rank, begin, end)
        self.loads = np.array([self._load(rank) for rank in range(len(runs))], dtype=np.int64)

    def improve_slowest(self) -> bool:
        """The best move from the slowest rank; False where none makes it faster without a slower partner."""
        rank = int(self.loads.argmax())
        begin, end, loss, gain = self._pieces(rank)
        best = self._best_gift(rank, begin, end, loss, gain)
        for move in (*self._neighbour_gifts(rank), self._best_exchange(rank, begin, end, loss, gain)):
            if move is not None and (best is None or move.load < best.load):
                best = move
        if best is None or best.load >= self.loads[rank]:
            return False
        self._take(rank, *best.piece)
        if best.back is not None:
            self._take(best.partner, *best.back)
            self._give(rank, *best.back)
        self._give(best.partner, *best.piece)
        for changed in (rank, best.partner):
            self.loads[changed] = self._load(changed)
        return True

    # -- moves ------------------------------------------------------------------------------------------------------

    def _pieces(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What a rank could give: begin and end, what it would save, and what the piece costs by itself."""
        begins, ends = [], []
        for begin, end in self.runs[rank]:
            inner = np.arange(begin + 1, end)
            begins += [np.array([begin]), inner, np.full(len(inner), begin)]
            ends += [np.array([end]), np.full(len(inner), end), inner]
        first, last = np.concatenate(begins), np.concatenate(ends)
        own = np.array(self.runs[rank])
        run = own[np.searchsorted(own[:, 0], first, side="right") - 1]
        gain = self.again[first] + self.below[last] - self.below[first]
        is_end, is_begin = (first > run[:, 0]), (last < run[:, 1])
        # The end of a run saves its tokens alone; without its beginning the rest pays for the path above it.
        loss = gain - np.where(is_end, self.again[first], 0)
        loss -= np.where(is_begin, self.again[np.minimum(last, len(self.again) - 1)], 0)
        return first, last, loss, gain

    def _best_gift(
        self, rank: int, begin: np.ndarray, end: np.ndarray, loss: np.ndarray, gain: np.ndarray
    ) -> _Move | None:
        """A piece for the least loaded rank."""
        partner = int(self.loads.argmin())
        if partner == rank:
            return None
        after = np.maximum(self.loads[rank] - loss, self.loads[partner] + gain)
        best = int(after.argmin())
        return _Move(int(after[best]), (int(begin[best]), int(end[best])), partner)

    def _neighbour_gifts(self, rank: int) -> list[_Move]:
        """Pieces for the ranks that hold the leaves beside a run, where they need not pay for the path above."""
        moves = []
        for begin, end in self.runs[rank]:
            if end < len(self.tree) and self.tree[end] == self.tree[begin]:
                cut = np.arange(begin, end)
                loss = self.below[end] - self.below[cut] + np.where(cut == begin, self.again[begin], 0)
                gain = self.again[cut] + self.below[end] - self.below[cut] - self.again[end]
                moves.append(self._beside(rank, int(self.owners[end]), cut, np.full_like(cut, end), loss, gain))
            if begin > 0 and self.tree[begin - 1] == self.tree[begin]:
                cut = np.arange(begin + 1, end + 1)
                rest = np.where(cut < end, self.again[np.minimum(cut, len(self.again) - 1)], 0)
                gain = self.below[cut] - self.below[begin]
                loss = self.again[begin] + gain - rest
                moves.append(self._beside(rank, int(self.owners[begin - 1]), np.full_like(cut, begin), cut, loss, gain))
        return moves

    def _beside(
        self, rank: int, partner: int, begin: np.ndarray, end: np.ndarray, loss: np.ndarray, gain: np.ndarray
    ) -> _Move:
        after = np.maximum(self.loads[rank] - loss, self.loads[partner] + gain)
        best = int(after.argmin())
        return _Move(int(after[best]), (int(begin[best]), int(end[best])), partner)

    def _best_exchange(
        self, rank: int, begin: np.ndarray, end: np.ndarray, loss: np.ndarray, gain: np.ndarray
    ) -> _Move | None:
        """A piece against a run of one of the least loaded ranks."""
        if len(begin) > MAX_PIECES:
            chosen = np.argsort(-loss, kind="stable")[np.linspace(0, len(begin) - 1, MAX_PIECES).astype(np.int64)]
            begin, end, loss, gain = begin[chosen], end[chosen], loss[chosen], gain[chosen]
        partners = np.argsort(self.loads, kind="stable")[:NUM_PARTNERS].tolist()
        found = [(each, *run) for each in partners if each != rank for run in self.runs[each]]
        if not found:
            return None
        partner, first, last = np.array(found).T
        back = self.again[first] + self.below[last] - self.below[first]
        mine = (self.loads[rank] - loss)[:, None] + back
        theirs = gain[:, None] + (self.loads[partner] - back)
        after = np.maximum(mine, theirs)
        row, column = divmod(int(after.argmin()), after.shape[1])
        piece, run = (int(begin[row]), int(end[row])), (int(first[column]), int(last[column]))
        return _Move(int(after[row, column]), piece, int(partner[column]), run)

    # -- runs -------------------------------------------------------------------------------------------------------

    def _load(self, rank: int) -> int:
        own = sum(self.again[begin] + self.below[end] - self.below[begin] for begin, end in self.runs[rank])
        return int(own) + self.beside[rank]

    def _take(self, rank: int, begin: int, end: int) -> None:
        own = self.runs[rank]
        number = next(index for index, run in enumerate(own) if run[0] <= begin and end <= run[1])
        first, last = own.pop(number)
        own[number:number] = [part for part in ((first, begin), (end, last)) if part[0] < part[1]]

    def _give(self, rank: int, begin: int, end: int) -> None:
        self.owners[begin:end] = rank
        own = self.runs[rank]
        for run in list(own):
            if self.tree[run[0]] == self.tree[begin] and (run[1] == begin or run[0] == end):
                own.remove(run)
                begin, end = min(begin, run[0]), max(end, run[1])
        own.append((begin, end))
        own.sort()


class _Exhaustive:
    """Branch and bound over all owners of a few leaves, runs or not, for a limited number of steps."""

    def __init__(self, leaves: Leaves, num_ranks: int, owners: np.ndarray, load: int, at_most: int) -> None:
        self.owners, self.load, self.at_most = owners, load, at_most
        self.path, self.again, self.tree = leaves.path.tolist(), leaves.again.tolist(), leaves.tree.tolist()
        self.dip = leaves.dip.tolist()
        self.rest = (leaves.below[-1] - leaves.below).tolist()  # cost of what is still to come, if nothing is cut
        self.loads, self.last = [0] * num_ranks, [-1] * num_ranks
        self.chosen = [0] * len(leaves.new)
        self.steps_left = NUM_EXHAUSTIVE_STEPS
        self._descend(0)

    def _descend(self, leaf: int) -> None:
        if self.steps_left == 0 or self.load <= self.at_most:
            return
        self.steps_left -= 1
        if leaf == len(self.path):
            self.load, self.owners = max(self.loads), np.array(self.chosen, dtype=np.int64)
            return
        if sum(self.loads) + self.rest[leaf] >= self.load * len(self.loads):
            return
        options = sorted((self.loads[rank] + self._cost(leaf, rank), rank) for rank in self._distinct_ranks(leaf))
        for load, rank in options:
            if load >= self.load:
                break
            before = self.loads[rank], self.last[rank]
            self.loads[rank], self.last[rank], self.chosen[leaf] = load, leaf, rank
            self._descend(leaf + 1)
            self.loads[rank], self.last[rank] = before

    def _cost(self, leaf: int, rank: int) -> int:
        """What a leaf adds to a rank that holds some earlier leaves."""
        last = self.last[rank]
        if last < 0 or self.tree[last] != self.tree[leaf]:
            return int(self.path[leaf])
        return int(self.path[leaf] - min([self.again[leaf], *self.dip[last + 1 : leaf]]))

    def _distinct_ranks(self, leaf: int) -> list[int]:
        """Ranks without those that are in the same state as an earlier one."""
        seen: dict[tuple[int, int], int] = {}
        for rank, load in enumerate(self.loads):
            last = self.last[rank]
            state = (load, last if last >= 0 and self.tree[last] == self.tree[leaf] else -1)
            seen.setdefault(state, rank)
        return list(seen.values())
