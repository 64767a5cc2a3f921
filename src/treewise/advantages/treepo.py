"""TreePO's advantage: a rollout against every group of rollouts that it shares a prefix with."""

from collections.abc import Sequence

import numpy as np

from treewise.advantages.group_tree import exact_mean, group_trees
from treewise.advantages.rollout_table import Credited, credited, read_rollouts
from treewise.errors import ConfigError
from treewise.tree.trajectory import Trajectory

AVERAGES = ("equal", "size")
SCALES = ("none", "batch")


def tree_path_mean(
    trajectories: Sequence[Trajectory], *, average: str = "equal", scale: str = "none", epsilon: float = 1e-8
) -> Credited:
    """`reward - mean of the group`, averaged over the groups on a rollout's path: all rollouts of the prompt, then
    those that share each longer prefix, down to the last shared one. One number for all tokens of a rollout. A group's
    mean is over its rollouts, which are what is compared; it is no value of a state (`group_tree`).

    Source: TreePO (arXiv 2508.17445, tree-based advantage estimation); released code: `core_algos.py`,
    `compute_tree_reinforce_plus_plus_baseline_outcome_advantage`. docs/tree-credit.md says where that differs.

    average: `equal`, or `size`: each group counts by its number of rollouts.
    scale: `batch` whitens over the trained tokens of all trajectories: subtracts their mean, divides by their deviation
        plus `epsilon`, as the released code does.

    Raises:
        ConfigError: an unknown name, or a negative epsilon.
        DataError: see `read_rollouts`.
    """
    if average not in AVERAGES or scale not in SCALES or not epsilon >= 0:
        raise ConfigError(
            f"average={average!r} must be one of {', '.join(AVERAGES)}, scale={scale!r} one of {', '.join(SCALES)}, "
            f"epsilon={epsilon} not negative."
        )
    rollouts = read_rollouts(trajectories)
    total_R, weight_R = np.zeros(len(rollouts.rewards)), np.zeros(len(rollouts.rewards))
    for tree in group_trees(rollouts):
        counts = tree.counts
        is_group = (counts > 1) & (counts < counts[tree.parent])
        is_group[-1] = counts[-1] > 1
        groups = {tuple(tree.through[state]): state for state in np.flatnonzero(is_group)}  # equal ones count once
        for state in groups.values():
            members, weight = tree.through[state], counts[state] if average == "size" else 1
            total_R[members] += weight * (rollouts.rewards[members] - exact_mean(rollouts.rewards[members]))
            weight_R[members] += weight
    advantages = (total_R / np.maximum(weight_R, 1))[rollouts.of_trajectory]
    if scale == "batch":
        trained_N = [np.count_nonzero(item.loss_weights) for item in rollouts.trajectories]
        mean = np.average(advantages, weights=trained_N)
        deviation = np.sqrt(np.average((advantages - mean) ** 2, weights=trained_N))
        advantages = (advantages - mean) / (deviation + epsilon) if deviation else np.zeros_like(advantages)
    return credited(rollouts, advantages.tolist(), f"tree_path_mean(average={average!r}, scale={scale!r})")
