"""Each rank's part of a step, as forests.

Every trajectory is in one part only, with its own terms of the loss, however many ranks compute its tokens. So the sum
over ranks of losses and gradients is what one process computes, provided that two numbers that depend on several
trajectories are kept: how many trajectories train a shared token (`weighting="once"`), and the loss weight of a whole
rollout (`rollout_mean`). Both are written into the trajectories of a part.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treewise.base.arrays import Ints
from treewise.distributed.placement.placement import Placement
from treewise.errors import DataError
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import restrict
from treewise.tree.trajectory import Trajectory, number_rollouts


def rank_part(
    forests: Sequence[Forest], placement: Placement, rank: int, weighting: str = "per_trajectory"
) -> list[Forest]:
    """The forests that one rank trains: whole ones unchanged, of others the part with this rank's trajectories.

    weighting: the objective's. Use the denominator of the whole step, which is the sum of the denominators of all
    parts.

    Raises:
        DataError: forests other than those that were placed.
    """
    counts = [forest.num_trajectories for forest in forests]
    if sum(counts) != len(placement.rank_of_trajectory):
        raise DataError(
            f"{sum(counts)} trajectories for a placement of {len(placement.rank_of_trajectory)}; "
            "give the forests that were placed."
        )
    parts = []
    for forest, ranks in zip(forests, np.split(placement.rank_of_trajectory, np.cumsum(counts)[:-1]), strict=True):
        own = np.flatnonzero(ranks == rank)
        if len(own):
            parts.append(restrict_forest(forest, own, weighting))
    return parts


def restrict_forest(forest: Forest, trajectories: Ints, weighting: str = "per_trajectory") -> Forest:
    """The forest of some trajectories of another, with the loss weights that they have there.

    trajectories: [n] int64 indices, ascending.

    Raises:
        DataError: a declared tree that is too large to be restored, under a weighting that needs all its flat tokens.
    """
    if len(trajectories) == forest.num_trajectories:
        return forest
    segments = restrict(forest.segments, trajectories)
    token_ids = forest.token_ids[segments.token_source]
    if forest.tree_streams and weighting == "per_trajectory":
        streams = {name: values[segments.token_source] for name, values in forest.tree_streams.items()}
        return Forest(segments, token_ids, None, streams)
    items = [forest.trajectories[index] for index in trajectories.tolist()]
    items = _with_rollout_weights(items, forest.trajectories, trajectories)
    part = Forest(segments, token_ids, tuple(items))
    if weighting != "per_trajectory":
        part.trajectories = tuple(_scaled(items, forest, part, trajectories, weighting))
    return part


def _with_rollout_weights(items: list[Trajectory], everything: Sequence[Trajectory], chosen: Ints) -> list[Trajectory]:
    """Sets `rollout_weight` where a rollout has rows outside of this part."""
    if all(item.rollout is None for item in items):
        return items
    rollout_N = number_rollouts(everything)
    weight_N = [item.weight for item in everything]
    whole_R = np.bincount(rollout_N, weights=weight_N)
    is_chosen = np.isin(np.arange(len(everything)), chosen)
    is_cut_R = np.bincount(rollout_N, weights=~is_chosen) > 0
    return [
        replace(item, rollout_weight=float(whole_R[rollout])) if item.rollout_weight is None and is_cut else item
        for item, rollout, is_cut in zip(items, rollout_N[chosen], is_cut_R[rollout_N[chosen]], strict=True)
    ]


def _scaled(items: list[Trajectory], forest: Forest, part: Forest, chosen: Ints, weighting: str) -> list[Trajectory]:
    """Scales loss weights so that `weighting`, which counts trajectories of the part only, gives the weights of the
    whole forest. They are float32, so each has a rounding error of 6e-8.
    """
    whole_F, part_F = forest.flat_weights(weighting), part.flat_weights(weighting)
    rollout_N = number_rollouts(items)
    before_R = np.bincount(rollout_N, weights=[item.weight for item in items])
    scaled: list[Trajectory] = []
    for position, (item, index) in enumerate(zip(items, chosen.tolist(), strict=True)):
        whole = whole_F[forest.path_offsets[index] : forest.path_offsets[index + 1]]
        in_part = part_F[part.path_offsets[position] : part.path_offsets[position + 1]]
        ratio = np.divide(whole, in_part, out=np.ones_like(whole), where=in_part > 0)
        is_same = bool((ratio == 1).all())
        scaled.append(item if is_same else replace(item, loss_weights=item.loss_weights * ratio))
    # The fraction of a rollout's weight in this part must not change with the scale.
    ratio_R = np.bincount(rollout_N, weights=[item.weight for item in scaled]) / before_R
    return [
        replace(item, rollout_weight=item.rollout_weight * float(ratio))
        if item.rollout_weight is not None and ratio != 1
        else item
        for item, ratio in zip(scaled, ratio_R[rollout_N], strict=True)
    ]
