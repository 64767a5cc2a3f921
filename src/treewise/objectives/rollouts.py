"""What losses take for a rollout of a step: the rows that share `rollout` within a `group`, wherever they stand.

A loss that counts rollouts needs all rows of each in one call of the engine, or `Trajectory.rollout_weight` on them. A
loss in which a token that several rows of a rollout train counts once needs them in one tree.
"""

import numpy as np

from treewise.errors import DataError
from treewise.objectives.protocol import may_merge_trees
from treewise.tree.forest import Forest, one_forest


def counts_rollouts(objective: object) -> bool:
    """Whether a loss depends on which rows are of one rollout. One that does not say how it normalizes may."""
    normalization = getattr(objective, "normalization", "rollout_mean")
    return normalization in ("rollout_mean", "rollout_sum") or needs_whole_rollouts(objective)


def needs_whole_rollouts(objective: object) -> bool:
    """Whether a loss needs all rows of a rollout in one call, whatever weight they carry."""
    is_once = not may_merge_trees(objective)
    return (
        _counts_shared_tokens_once(objective)
        or getattr(objective, "needs_whole_groups", False)
        or (is_once and getattr(objective, "normalization", "rollout_mean") == "rollout_mean")
    )


def step_forest(forests: object, objective: object) -> Forest:
    """The forest of a step, as `one_forest` makes it; trees that have rows of one rollout in common are merged where
    the loss needs it.

    Raises:
        DataError: such trees under `weighting="once"`, which counts a token in each tree.
    """
    forest = one_forest(forests)
    if not _counts_shared_tokens_once(objective) or forest.tree_streams or forest.num_trees < 2:
        return forest
    tree_N = np.searchsorted(forest.tree_starts, forest.ends, side="right") - 1
    first_N = forest.token_ids[forest.tree_starts][tree_N]  # of a merged forest few trees begin alike
    places = np.unique(np.stack([forest.rollout_of_trajectory, first_N, tree_N], axis=1), axis=0)
    is_apart = (places[1:, :2] == places[:-1, :2]).all(axis=1)
    if not is_apart.any():
        return forest
    merged = Forest.from_trajectories(forest.trajectories, tree_of=tree_N.tolist())
    if merged.num_tokens == forest.num_tokens:  # their images or experts differ
        return forest
    if not may_merge_trees(objective):
        rollout = places[int(np.argmax(is_apart)), 0]
        item = forest.trajectories[int(np.argmax(forest.rollout_of_trajectory == rollout))]
        raise DataError(
            f"rows of rollout {item.rollout!r} of group {item.group!r} are in several trees, and weighting='once' "
            "counts a token once in each tree, but this loss counts it once in the rollout. Give all rows of a "
            "rollout as one list, which is one tree."
        )
    return merged


def _counts_shared_tokens_once(objective: object) -> bool:
    """Whether a token that several rows of a rollout train counts once in it: in ratios and scores of whole rollouts,
    and by `weighting="per_rollout"`.
    """
    return getattr(objective, "has_sequence_ratios", False) or getattr(objective, "weighting", None) == "per_rollout"
