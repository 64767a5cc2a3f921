"""Which rank trains which trajectories of a step.

Every trajectory goes to exactly one rank. A tree may be cut between ranks; each of them then computes the path above
the cut. `split` makes the forests of each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treewise.distributed.placement.cost_model import CostModel
from treewise.distributed.placement.leaf_costs import Leaves, StepCosts, costs_of
from treewise.distributed.placement.lower_bound import least_load
from treewise.distributed.placement.part_costs import part_costs
from treewise.distributed.placement.plan_refinement import NUM_PLANNED_LEAVES, refine
from treewise.distributed.placement.search import GOOD_ENOUGH, best_owners, is_even, loads_of
from treewise.errors import DataError, PlanError, check_choice
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import Segments

SPLITS = ("rollouts", "trajectories", "never")
# Successive placements, each with the cost that open tokens have in the parts of the one before.
NUM_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of every trajectory.

    rank_of_trajectory: [N] int64, trajectories of all forests in order. seconds: [ranks] float64, predicted.
    bound_seconds: a lower bound of the slowest rank's time in any placement (`lower_bound`).
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


def assign_ranks(
    shapes: Sequence[Forest | Segments],
    num_ranks: int,
    cost: CostModel,
    *,
    max_tokens: int | None = None,
    split: str = "rollouts",
    in_lockstep: bool = False,
    image_tokens: Sequence[np.ndarray] | None = None,
) -> Placement:
    """Assigns a step's trajectories to ranks so that the predicted time of the slowest rank is small.

    Deterministic: the same shapes and costs give the same placement on every machine. A rank may get nothing.

    shapes: the forests of a step, or only their segments, each of whose trajectories then counts as a rollout.
    split: where trees may be cut. `rollouts`: between trajectories, but all rows of a rollout go to one rank, which
        suits every objective that is a sum over rollouts. `trajectories`: anywhere between trajectories. `never`:
        trees stay whole, for losses that compare the trajectories of a tree.
    in_lockstep: ranks wait for one another at every pass, as they do with sharded parameters. Tokens are then balanced
        instead of seconds, because a step takes as many turns as the rank with the most micro-batches.
    image_tokens: of each forest, [I] float64: how many tokens cost as much as the vision tower's forward and backward
        for each image on it (`Forest.images`). A rank computes each distinct image of its trajectories once.

    Raises:
        PlanError: no rank, a budget below one token, or an unknown `split`.
        DataError: no forest.
    """
    check_choice("split", split, SPLITS, PlanError)
    if num_ranks < 1:
        raise PlanError(f"num_ranks is {num_ranks}; a step needs at least 1.")
    if max_tokens is not None and max_tokens < 1:
        raise PlanError(f"max_tokens is {max_tokens}; a micro-batch holds at least 1 token.")
    if not shapes:
        raise DataError("no forest to place; give at least one.")
    step = costs_of(shapes, cost, max_tokens, image_tokens)
    may_cut = _cuts(shapes, step.leaves(), split)
    bound = least_load(step, step.leaves(np.zeros_like(step.recompute)).joined(may_cut), num_ranks)
    if in_lockstep and cost.seconds_per_token > 0:
        even = costs_of(shapes, replace(cost, seconds_per_pair=0.0), max_tokens, image_tokens)
        least = least_load(even, even.leaves(np.zeros_like(even.recompute)).joined(may_cut), num_ranks)
        rank_N, _ = _assign(even, may_cut, num_ranks, least)
        loads = part_costs(step, rank_N, num_ranks).loads
    else:
        rank_N, loads = _assign(step, may_cut, num_ranks, bound)
    return Placement(
        rank_of_trajectory=rank_N,
        seconds=loads * step.seconds_per_unit,
        bound_seconds=bound * step.seconds_per_unit,
    )


def _assign(step: StepCosts, may_cut: np.ndarray, num_ranks: int, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """[N] int64, the rank of each trajectory, and [ranks] int64, the cost of each rank in units."""
    leaves, at_most = step.leaves().joined(may_cut), bound + int(bound * GOOD_ENOUGH)
    if num_ranks == 1:
        rank_N = np.zeros(len(leaves.of_trajectory), dtype=np.int64)
        return rank_N, part_costs(step, rank_N, 1).loads
    owners, extra_load = None, np.zeros(num_ranks, dtype=np.int64)
    best, loads = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for _ in range(NUM_ROUNDS):
        owners = best_owners(leaves, extra_load, at_most, owners)
        costs = part_costs(step, owners[leaves.of_trajectory], num_ranks)
        if not len(loads) or costs.loads.max() < loads.max():
            best, loads = owners, costs.loads
        if (costs.recompute == step.recompute).all() or loads.max() <= at_most or is_even(loads):
            break
        leaves = step.leaves(costs.recompute).joined(may_cut)
        # Leaves have the mean cost of open tokens over ranks; each rank's difference from that stays constant.
        extra_load = costs.loads - loads_of(leaves, owners, num_ranks)
    if step.max_tokens is not None and len(best) <= NUM_PLANNED_LEAVES:
        best, loads = refine(step, leaves.of_trajectory, best, num_ranks)
    return best[leaves.of_trajectory], loads


def _cuts(shapes: Sequence[Forest | Segments], leaves: Leaves, split: str) -> np.ndarray:
    """[L] bool, the leaves before which a cut is allowed."""
    if split == "rollouts":
        return _between_rollouts(shapes, leaves)
    return leaves.starts_tree() if split == "never" else np.ones(len(leaves.new), dtype=bool)


def _between_rollouts(shapes: Sequence[Forest | Segments], leaves: Leaves) -> np.ndarray:
    """[L] bool, the leaves before which no rollout has begun and not ended."""
    rollout, num_rollouts = [], 0
    for shape in shapes:
        if isinstance(shape, Forest):
            rollout_n = shape.rollout_of_trajectory
        else:
            rollout_n = np.arange(len(shape.end_segment))
        rollout.append(rollout_n + num_rollouts)
        num_rollouts += int(rollout_n.max()) + 1
    rollout_N = np.concatenate(rollout)
    first = np.full(num_rollouts, len(leaves.new))
    last = np.zeros(num_rollouts, dtype=np.int64)
    np.minimum.at(first, rollout_N, leaves.of_trajectory)
    np.maximum.at(last, rollout_N, leaves.of_trajectory)
    change = np.zeros(len(leaves.new) + 1, dtype=np.int64)
    np.add.at(change, first + 1, 1)
    np.subtract.at(change, last + 1, 1)
    return np.cumsum(change)[:-1] == 0
