"""Refines placements of small steps with real plans.

With few leaves, one extra micro-batch dominates a rank's cost, and an additive cost per leaf cannot predict it. So the
parts of ranks are planned: leaves move between ranks, or are swapped, as long as that makes the slowest rank faster.
"""

from collections.abc import Iterator

import numpy as np

from treewise.distributed.placement.cost_model import work_of
from treewise.distributed.placement.leaf_costs import StepCosts
from treewise.planning.planner import plan
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import restrict

NUM_PLANNED_LEAVES = 20
MAX_PLANS = 400


class PlannedCosts:
    """Costs of the plans of sets of leaves, in units; each is planned once. leaf_N: [N] int64, the leaf of each
    trajectory.
    """

    def __init__(self, step: StepCosts, leaf_N: np.ndarray) -> None:
        self.step, self.leaf_N = step, leaf_N
        self._cost_of: dict[tuple[int, ...], int] = {(): 0}

    @property
    def plans_left(self) -> int:
        return MAX_PLANS - len(self._cost_of)

    def cost(self, leaves: tuple[int, ...]) -> int:
        """Cost of a rank with these leaves (ascending indices)."""
        if leaves not in self._cost_of:
            is_chosen = np.isin(self.leaf_N, leaves)
            part = restrict(self.step.segments, np.flatnonzero(is_chosen))
            rank_plan = plan(Forest(part, np.zeros(part.num_tokens, dtype=np.int32), None, {}), self.step.max_tokens)
            seconds = self.step.cost.seconds(work_of(rank_plan))
            if self.step.images is not None:
                seconds += self.step.images.at_first_places_of(is_chosen)[0].sum()
            self._cost_of[leaves] = round(seconds / self.step.seconds_per_unit)
        return self._cost_of[leaves]


def refine(costs: PlannedCosts, owners: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """The rank of each leaf ([L] int64) after the search, and the costs of the ranks' plans ([ranks] int64).

    owners: [L] int64, where the search starts.
    """
    leaves_of = [tuple(np.flatnonzero(owners == rank).tolist()) for rank in range(num_ranks)]
    loads = [costs.cost(leaves) for leaves in leaves_of]
    is_better = True
    while is_better and costs.plans_left > 0:
        is_better = False
        slowest = max(range(num_ranks), key=lambda rank: loads[rank])
        for partner, of_slowest, of_partner in _moves(leaves_of, slowest):
            new_loads = costs.cost(of_slowest), costs.cost(of_partner)
            if max(new_loads) < loads[slowest]:
                leaves_of[slowest], leaves_of[partner] = of_slowest, of_partner
                loads[slowest], loads[partner] = new_loads
                is_better = True
                break
            if costs.plans_left <= 0:
                break
    refined = np.empty_like(owners)
    for rank, leaves in enumerate(leaves_of):
        refined[list(leaves)] = rank
    return refined, np.array(loads, dtype=np.int64)


def _moves(leaves_of: list[tuple[int, ...]], slowest: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """A partner, and new leaves of the slowest rank and of the partner: all transfers of one leaf, then all swaps."""
    for is_swap in (False, True):
        for partner in range(len(leaves_of)):
            if partner == slowest:
                continue
            for leaf in leaves_of[slowest]:
                rest = [other for other in leaves_of[slowest] if other != leaf]
                if not is_swap:
                    yield partner, tuple(rest), tuple(sorted([*leaves_of[partner], leaf]))
                    continue
                for back in leaves_of[partner]:
                    others = [other for other in leaves_of[partner] if other != back]
                    yield partner, tuple(sorted([*rest, back])), tuple(sorted([*others, leaf]))
