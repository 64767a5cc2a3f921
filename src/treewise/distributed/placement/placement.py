"""Which rank trains which trajectories of a step.

Every trajectory goes to exactly one rank. A tree that is cut is computed in part on several ranks, the path above a cut
on both sides of it; `shares` makes the parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treewise.distributed.placement.cost_model import CostModel
from treewise.distributed.placement.leaf_costs import Leaves, Priced, priced
from treewise.distributed.placement.local_search import GOOD_ENOUGH, best_owners, better_owners, is_even, loads_of
from treewise.distributed.placement.lower_bound import least_load
from treewise.distributed.placement.part_costs import part_costs
from treewise.distributed.placement.plan_refinement import NUM_PLANNED_LEAVES, Shares, polished
from treewise.errors import DataError, PlanError
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import Segments

SPLITS = ("rollouts", "trajectories", "never")
# Placements that are found one after the other, each with what open tokens cost in the parts of the one before.
NUM_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of every trajectory.

    rank_of_trajectory: [N] int64, the trajectories of all forests, one forest after the other.
    seconds: [ranks] float64, predicted. bound_seconds: no placement has a slowest rank below it: the mean over ranks
    if nothing were computed twice, or the most costly single trajectory, which nobody can divide.
    """

    rank_of_trajectory: np.ndarray
    seconds: np.ndarray
    bound_seconds: float

    @property
    def num_ranks(self) -> int:
        return len(self.seconds)

    @property
    def imbalance(self) -> float:
        """Slowest rank over the mean of all; 1 is perfect."""
        return float(self.seconds.max() / self.seconds.mean())


def place(
    shapes: Sequence[Forest | Segments],
    num_ranks: int,
    cost: CostModel,
    *,
    max_tokens: int | None = None,
    split: str = "rollouts",
    in_step: bool = False,
) -> Placement:
    """Places a step's trajectories on ranks so that the slowest rank's predicted time is as short as the search finds.

    shapes: the forests of a step, or only their segments, whose trajectories are then taken for rollouts of their own.
    split: where trees may be cut. `rollouts`: between trajectories, but never so that one rollout is spread over ranks,
    which suits every objective that is a sum over rollouts. `trajectories`: anywhere between trajectories. `never`:
    trees stay whole, for losses that compare the trajectories of a tree. in_step: ranks wait for one another at every
    pass, as sharded parameters make them do. Then tokens are made even instead of seconds: a full micro-batch beside
    one with more attention saves nothing, and what counts is how many of them a rank has. Deterministic: the same
    shapes and prices give the same placement on every machine. A rank may get nothing.

    Raises:
        PlanError: no rank, a budget below one token, or an unknown `split`.
        DataError: no forest.
    """
    if split not in SPLITS:
        raise PlanError(f"split={split!r} is unknown; choose one of {', '.join(SPLITS)}.")
    if num_ranks < 1:
        raise PlanError(f"num_ranks is {num_ranks}; a step needs at least 1.")
    if max_tokens is not None and max_tokens < 1:
        raise PlanError(f"max_tokens is {max_tokens}; a micro-batch holds at least 1 token.")
    if not shapes:
        raise DataError("nothing to place: no forest given.")
    step = priced(shapes, cost, max_tokens)
    may_cut = _cuts(shapes, step.leaves(), split)
    bound = least_load(step, step.leaves(np.zeros_like(step.again)).joined(may_cut), num_ranks)
    if in_step and cost.seconds_per_token > 0:
        even = priced(shapes, replace(cost, seconds_per_pair=0.0), max_tokens)
        least = least_load(even, even.leaves(np.zeros_like(even.again)).joined(may_cut), num_ranks)
        rank_N, _ = _placed(even, may_cut, num_ranks, least)
        loads = part_costs(step, rank_N, num_ranks).loads
    else:
        rank_N, loads = _placed(step, may_cut, num_ranks, bound)
    return Placement(
        rank_of_trajectory=rank_N,
        seconds=loads * step.seconds_per_unit,
        bound_seconds=bound * step.seconds_per_unit,
    )


def _placed(step: Priced, may_cut: np.ndarray, num_ranks: int, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """[N] int64, the rank of each trajectory, and [ranks] int64, the units that each computes."""
    leaves = step.leaves().joined(may_cut)
    if num_ranks == 1:
        rank_N = np.zeros(len(leaves.of_trajectory), dtype=np.int64)
        return rank_N, part_costs(step, rank_N, 1).loads
    owners = best_owners(leaves, num_ranks)
    parts = part_costs(step, owners[leaves.of_trajectory], num_ranks)
    best, loads = owners, parts.loads
    at_most = bound + int(bound * GOOD_ENOUGH)
    for _ in range(NUM_ROUNDS):
        if (parts.again == step.again).all() or loads.max() <= at_most or is_even(loads):
            break
        leaves = step.leaves(parts.again).joined(may_cut)
        # Shared open tokens have their mean price; what a rank's own parts differ from that stays as it is.
        beside = parts.loads - loads_of(leaves, owners, num_ranks)
        owners = better_owners(leaves, owners, beside, at_most)
        parts = part_costs(step, owners[leaves.of_trajectory], num_ranks)
        if parts.loads.max() < loads.max():
            best, loads = owners, parts.loads
    if step.max_tokens is not None and len(best) <= NUM_PLANNED_LEAVES:
        best, loads = polished(Shares(step, leaves.of_trajectory), best, num_ranks)
    return best[leaves.of_trajectory], loads


def _cuts(shapes: Sequence[Forest | Segments], leaves: Leaves, split: str) -> np.ndarray:
    """[L] bool, leaves before which a tree may be cut, and first leaves of trees that need not stay together."""
    if split == "rollouts":
        return _between_rollouts(shapes, leaves)
    return leaves.starts_tree() if split == "never" else np.ones(len(leaves.new), dtype=bool)


def _between_rollouts(shapes: Sequence[Forest | Segments], leaves: Leaves) -> np.ndarray:
    """[L] bool, leaves before which no rollout of their forest is under way."""
    rollout, num_rollouts = [], 0
    for shape in shapes:
        if isinstance(shape, Forest):
            own = shape.rollout_of_trajectory
        else:
            own = np.arange(len(shape.end_segment))
        rollout.append(own + num_rollouts)
        num_rollouts += int(own.max()) + 1
    number = np.concatenate(rollout)
    first = np.full(num_rollouts, len(leaves.new))
    last = np.zeros(num_rollouts, dtype=np.int64)
    np.minimum.at(first, number, leaves.of_trajectory)
    np.maximum.at(last, number, leaves.of_trajectory)
    change = np.zeros(len(leaves.new) + 1, dtype=np.int64)
    np.add.at(change, first + 1, 1)
    np.subtract.at(change, last + 1, 1)
    return np.cumsum(change)[:-1] == 0
