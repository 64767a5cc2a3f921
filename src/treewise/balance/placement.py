"""Which rank trains which trajectories of a step.

Every trajectory goes to exactly one rank. A tree that is cut is computed in part on several ranks, the path above a cut
on both sides of it; `shares` makes the parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treewise.balance.costs import CostModel
from treewise.balance.filling import lower_bound
from treewise.balance.leaves import Leaves, leaves_of
from treewise.balance.search import best_owners, loads_of
from treewise.errors import DataError, PlanError
from treewise.forest import Forest
from treewise.merging import Segments

SPLITS = ("rollouts", "trajectories", "never")


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
) -> Placement:
    """Places a step's trajectories on ranks so that the slowest rank's predicted time is as short as the search finds.

    shapes: the forests of a step, or only their segments, whose trajectories are then taken for rollouts of their own.
    split: where trees may be cut. `rollouts`: between trajectories, but never so that one rollout is spread over ranks,
    which suits every objective that is a sum over rollouts. `trajectories`: anywhere between trajectories. `never`:
    trees stay whole, for losses that compare the trajectories of a tree. Deterministic: the same shapes and prices give
    the same placement on every machine. A rank may get nothing.

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
    leaves = leaves_of(shapes, cost, max_tokens)
    if split == "rollouts":
        leaves = leaves.joined(_between_rollouts(shapes, leaves))
    elif split == "never":
        leaves = leaves.joined(leaves.starts_tree())
    owners = np.zeros(len(leaves.new), dtype=np.int64) if num_ranks == 1 else best_owners(leaves, num_ranks)
    return Placement(
        rank_of_trajectory=owners[leaves.of_trajectory],
        seconds=loads_of(leaves, owners, num_ranks) * leaves.seconds_per_unit,
        bound_seconds=lower_bound(leaves, num_ranks) * leaves.seconds_per_unit,
    )


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
