"""Each rank's share of a step, as forests of its own.

Every trajectory is in one share only and brings its own terms of the loss, however many ranks compute its tokens. So
the sum over ranks of losses and gradients is what one process computes, if two things that look beyond a trajectory
stay as they were: how many trajectories train a shared token (`weighting="once"`), and what a whole rollout weighs
(`rollout_mean`). Both are written into the trajectories of a part.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treewise.distributed.placement.placement import Placement
from treewise.errors import DataError
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import restrict
from treewise.tree.trajectory import Trajectory, number_rollouts


def share_of(
    forests: Sequence[Forest], placement: Placement, rank: int, weighting: str = "per_trajectory"
) -> list[Forest]:
    """The forests that one rank trains: whole ones as they are, of others the part with its own trajectories.

    weighting: the objective's. Call the objective with the share, and with the denominator of the whole step, which is
    the sum of the denominators of all shares.

    Raises:
        DataError: forests other than those that were placed.
    """
    counts = [forest.num_trajectories for forest in forests]
    if sum(counts) != len(placement.rank_of_trajectory):
        raise DataError(
            f"{sum(counts)} trajectories for a placement of {len(placement.rank_of_trajectory)}; "
            "give the forests that were placed."
        )
    shares = []
    for forest, ranks in zip(forests, np.split(placement.rank_of_trajectory, np.cumsum(counts)[:-1]), strict=True):
        mine = np.flatnonzero(ranks == rank)
        if len(mine):
            shares.append(part_of(forest, mine, weighting))
    return shares


def part_of(forest: Forest, trajectories: np.ndarray, weighting: str = "per_trajectory") -> Forest:
    """The forest of some trajectories of another one ([n] int64 indices, ascending), which count as they did there.

    Raises:
        DataError: a declared tree that is too large to hold its trajectories, under a weighting that looks at several.
    """
    if len(trajectories) == forest.num_trajectories:
        return forest
    segments = restrict(forest.segments, trajectories)
    token_ids = forest.token_ids[segments.token_source]
    if forest.trajectories is None:
        if weighting != "per_trajectory":
            raise DataError(
                f"a declared tree that is too large to hold its trajectories cannot be cut under {weighting=}; "
                "place it with split='never'."
            )
        streams = {name: values[segments.token_source] for name, values in forest.tree_streams.items()}
        return Forest(segments, token_ids, None, streams)
    items = [forest.trajectories[index] for index in trajectories.tolist()]
    items = _with_rollout_weights(items, forest.trajectories, trajectories)
    part = Forest(segments, token_ids, tuple(items))
    if weighting != "per_trajectory":
        part.trajectories = tuple(_scaled(items, forest, part, trajectories, weighting))
    return part


def _with_rollout_weights(
    items: list[Trajectory], everything: Sequence[Trajectory], chosen: np.ndarray
) -> list[Trajectory]:
    """Trajectories of a rollout that has others elsewhere now know what all of it weighs."""
    if all(item.rollout is None for item in items):
        return items
    rollout_N = number_rollouts(everything)
    weight_N = [_weight(item) for item in everything]
    whole_R = np.bincount(rollout_N, weights=weight_N)
    is_here = np.isin(np.arange(len(everything)), chosen)
    is_parted_R = np.bincount(rollout_N, weights=~is_here) > 0
    return [
        replace(item, rollout_weight=float(whole_R[number])) if item.rollout_weight is None and is_parted else item
        for item, number, is_parted in zip(items, rollout_N[chosen], is_parted_R[rollout_N[chosen]], strict=True)
    ]


def _scaled(
    items: list[Trajectory], forest: Forest, part: Forest, chosen: np.ndarray, weighting: str
) -> list[Trajectory]:
    """Weights that `weighting`, which counts within the part, divides to what they are in the whole forest.

    They are float32, so they carry a rounding error of 6e-8 each.
    """
    whole_F, here_F = forest.flat_weights(weighting), part.flat_weights(weighting)
    rollout_N = number_rollouts(items)
    before_R = np.bincount(rollout_N, weights=[_weight(item) for item in items])
    scaled: list[Trajectory] = []
    for number, (item, index) in enumerate(zip(items, chosen.tolist(), strict=True)):
        whole = whole_F[forest.path_offsets[index] : forest.path_offsets[index + 1]]
        here = here_F[part.path_offsets[number] : part.path_offsets[number + 1]]
        ratio = np.divide(whole, here, out=np.ones_like(whole), where=here > 0)
        is_same = bool((ratio == 1).all())
        scaled.append(item if is_same else replace(item, loss_weights=item.loss_weights * ratio))
    # A rollout's share of its weight that lies here must not change with the scale.
    ratio_R = np.bincount(rollout_N, weights=[_weight(item) for item in scaled]) / before_R
    return [
        replace(item, rollout_weight=item.rollout_weight * float(ratio))
        if item.rollout_weight is not None and ratio != 1
        else item
        for item, ratio in zip(scaled, ratio_R[rollout_N], strict=True)
    ]


def _weight(item: Trajectory) -> float:
    return float(np.asarray(item.loss_weights, dtype=np.float64).sum())
