"""Refines placements of small steps with real plans.

With few leaves, one extra micro-batch dominates a rank's cost, and an additive cost per leaf cannot predict it. So the
parts of ranks are planned: leaves move between ranks, or are swapped, as long as that makes the slowest rank faster.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np

from treewise.distributed.placement.cost_model import work_of
from treewise.distributed.placement.leaf_costs import StepCosts
from treewise.planning.planner import plan
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import restrict

NUM_PLANNED_LEAVES = 20
MAX_PLANS = 400
LeafSet = frozenset[int]


def refine(step: StepCosts, leaf_N: np.ndarray, owners: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """The rank of each leaf ([L] int64) after the search, and the costs of the ranks' plans ([ranks] int64), in units.

    leaf_N: [N] int64, the leaf of each trajectory. owners: [L] int64, where the search starts.
    """

    @cache
    def cost(leaves: LeafSet) -> int:
        """Of a rank with these leaves."""
        if not leaves:
            return 0
        is_chosen = np.isin(leaf_N, list(leaves))
        part = restrict(step.segments, np.flatnonzero(is_chosen))
        rank_plan = plan(Forest(part, np.zeros(part.num_tokens, dtype=np.int32), None, {}), step.max_tokens)
        seconds = step.cost.seconds(work_of(rank_plan))
        if step.images is not None:
            seconds += step.images.at_first_places_of(is_chosen)[0].sum()
        return round(seconds / step.seconds_per_unit)

    parts = [frozenset(np.flatnonzero(owners == rank).tolist()) for rank in range(num_ranks)]
    is_better = True
    while is_better:
        is_better = False
        slowest = max(range(num_ranks), key=lambda rank: cost(parts[rank]))
        for partner, of_slowest, of_partner in _moves(parts, slowest):
            if cost.cache_info().currsize >= MAX_PLANS:
                break
            if max(cost(of_slowest), cost(of_partner)) < cost(parts[slowest]):
                parts[slowest], parts[partner] = of_slowest, of_partner
                is_better = True
                break
    refined = np.empty_like(owners)
    for rank, leaves in enumerate(parts):
        refined[list(leaves)] = rank
    return refined, np.array([cost(leaves) for leaves in parts], dtype=np.int64)


def _moves(parts: list[LeafSet], slowest: int) -> Iterator[tuple[int, LeafSet, LeafSet]]:
    """A partner, and new leaves of the slowest rank and of the partner: all transfers of one leaf, then all swaps."""
    own, others = sorted(parts[slowest]), [rank for rank in range(len(parts)) if rank != slowest]
    for partner, leaf in product(others, own):
        yield partner, parts[slowest] - {leaf}, parts[partner] | {leaf}
    for partner, leaf in product(others, own):
        for back in sorted(parts[partner]):
            yield partner, parts[slowest] - {leaf} | {back}, parts[partner] - {back} | {leaf}
