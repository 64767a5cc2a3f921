"""Small steps placed by the plans themselves.

In a step of a few leaves one micro-batch more, or a trunk that a cut makes needless, is a large part of a rank's cost,
and which it is no sum over leaves can say. There are few shares then, so they are planned: leaves move between ranks,
or change places, as long as that makes the slowest rank faster.
"""

from collections.abc import Iterator

import numpy as np

from treewise.distributed.placement.cost_model import work_of
from treewise.distributed.placement.leaf_costs import Priced
from treewise.planning.planner import plan
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import restrict

NUM_PLANNED_LEAVES = 20
MOST_PLANS = 400


class Shares:
    """What the plans of shares cost, in units; each is made once. leaf_N: [N] int64, the leaf of each trajectory."""

    def __init__(self, step: Priced, leaf_N: np.ndarray) -> None:
        self.step, self.leaf_N = step, leaf_N
        self._known: dict[tuple[int, ...], int] = {(): 0}

    @property
    def plans_left(self) -> int:
        return MOST_PLANS - len(self._known)

    def cost(self, leaves: tuple[int, ...]) -> int:
        """Of a rank with these leaves, ascending."""
        if leaves not in self._known:
            part = restrict(self.step.segments, np.flatnonzero(np.isin(self.leaf_N, leaves)))
            made = plan(Forest(part, np.zeros(part.num_tokens, dtype=np.int32), None, {}), self.step.max_tokens)
            seconds = self.step.cost.seconds(work_of(made))
            self._known[leaves] = round(seconds / self.step.seconds_per_unit)
        return self._known[leaves]


def polished(shares: Shares, owners: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """[L] int64 owners after the search, and [ranks] int64 what their plans cost."""
    own = [tuple(np.flatnonzero(owners == rank).tolist()) for rank in range(num_ranks)]
    loads = [shares.cost(each) for each in own]
    is_better = True
    while is_better and shares.plans_left > 0:
        is_better = False
        slowest = max(range(num_ranks), key=lambda rank: loads[rank])
        for partner, mine, theirs in _moves(own, slowest):
            costs = shares.cost(mine), shares.cost(theirs)
            if max(costs) < loads[slowest]:
                own[slowest], own[partner] = mine, theirs
                loads[slowest], loads[partner] = costs
                is_better = True
                break
            if shares.plans_left <= 0:
                break
    found = np.empty_like(owners)
    for rank, each in enumerate(own):
        found[list(each)] = rank
    return found, np.array(loads, dtype=np.int64)


def _moves(own: list[tuple[int, ...]], slowest: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Another rank, and what both would have, for every leaf given away, and every exchange of two."""
    for takes in (False, True):
        for partner in range(len(own)):
            if partner == slowest:
                continue
            for leaf in own[slowest]:
                rest = [each for each in own[slowest] if each != leaf]
                if not takes:
                    yield partner, tuple(rest), tuple(sorted([*own[partner], leaf]))
                    continue
                for back in own[partner]:
                    kept = [each for each in own[partner] if each != back]
                    yield partner, tuple(sorted([*rest, back])), tuple(sorted([*kept, leaf]))
