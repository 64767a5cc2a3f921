"""Advantages of whole rollouts, from the rewards of their group. Letters: R rollouts, G groups."""

from collections.abc import Sequence

import numpy as np

from treewise.advantages.rollout_table import Credited, Rollouts, credited, read_rollouts
from treewise.errors import ConfigError, check_choice
from treewise.tree.trajectory import Trajectory

SCALES = ("group", "batch", "none")


def group_normalized(trajectories: Sequence[Trajectory], *, scale: str = "group", epsilon: float = 1e-4) -> Credited:
    """`(r - mean of the group) / (standard deviation + epsilon)`.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300, section 4.1.2). As in TRL's `scale_rewards`, the deviation is the
    unbiased one (n - 1), and `epsilon` is added to it.

    scale: `group` uses the deviation of the group, `batch` of all rollouts given (REINFORCE++, arXiv 2501.03262),
    `none` divides by nothing (`mean_centered`).

    Raises:
        ConfigError: an unknown scale, or a negative epsilon.
        DataError: see `read_rollouts`.
    """
    check_choice("scale", scale, SCALES)
    if not epsilon >= 0:
        raise ConfigError(f"epsilon={epsilon} must not be negative.")
    rollouts = read_rollouts(trajectories)
    centred_R = _centred(rollouts)
    if scale == "group":
        degrees = np.maximum(rollouts.group_sizes - 1, 1)
        deviation_G = np.sqrt(np.bincount(rollouts.group, weights=centred_R**2) / degrees)
        centred_R = _divided(centred_R, deviation_G[rollouts.group] + epsilon)
    elif scale == "batch":
        deviation = float(np.std(rollouts.rewards, ddof=1)) if len(rollouts.rewards) > 1 else 0.0
        centred_R = _divided(centred_R, np.full(len(centred_R), deviation + epsilon))
    return _on_rollouts(rollouts, centred_R, f"group_normalized(scale={scale!r})")


def mean_centered(trajectories: Sequence[Trajectory]) -> Credited:
    """`r - mean of the group`.

    Source: Dr. GRPO (arXiv 2503.20783, section 3.1): dividing by the deviation favours questions that are too easy or
    too hard.
    """
    rollouts = read_rollouts(trajectories)
    return _on_rollouts(rollouts, _centred(rollouts), "mean_centered")


def leave_one_out(trajectories: Sequence[Trajectory]) -> Credited:
    """`r - mean of the others of the group`, an unbiased baseline.

    Source: RLOO (arXiv 2402.14740, section 2.2; Kool et al. 2019). It is `mean_centered` times `n / (n - 1)`.
    """
    rollouts = read_rollouts(trajectories)
    sizes = rollouts.group_sizes[rollouts.group]
    factor = np.where(sizes > 1, sizes / np.maximum(sizes - 1, 1), 0.0)
    return _on_rollouts(rollouts, _centred(rollouts) * factor, "leave_one_out")


def _centred(rollouts: Rollouts) -> np.ndarray:
    """[R] rewards without their group's mean; exactly 0 where a group has nothing to compare."""
    centred = rollouts.rewards - rollouts.group_means(rollouts.rewards)[rollouts.group]
    silent = rollouts.is_flat_group() | (rollouts.group_sizes == 1)
    return np.where(silent[rollouts.group], 0.0, centred)


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(values, by, out=np.zeros_like(values), where=by > 0)


def _on_rollouts(rollouts: Rollouts, advantages_R: np.ndarray, method: str) -> Credited:
    return credited(rollouts, [float(value) for value in advantages_R[rollouts.of_trajectory]], method)
