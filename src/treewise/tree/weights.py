"""How often a token that several trajectories share counts in a loss: the weightings of `Forest.flat_weights`.

`per_trajectory` leaves loss weights as they are, as flat training does. `once` divides each by the number of
trajectories that train its tree token, so that a shared token counts like any other: their mean. `per_rollout` divides
by the number of trajectories *of the same rollout* that train it, so that a rollout counts its tokens once, however its
rows overlap.

Letters: T tree tokens, F flat tokens.
"""

from typing import TYPE_CHECKING

import numpy as np

from treewise.errors import ConfigError

if TYPE_CHECKING:
    from treewise.tree.forest import Forest

WEIGHTINGS = ("per_trajectory", "once", "per_rollout")


def check_weighting(weighting: str) -> None:
    """Raises `ConfigError` for an unknown weighting."""
    if weighting not in WEIGHTINGS:
        raise ConfigError(f"weighting={weighting!r} is unknown; choose one of {', '.join(WEIGHTINGS)}.")


def flat_weights(forest: "Forest", weighting: str) -> np.ndarray:
    """[F] float64, the loss weight of every flat token, trajectory after trajectory.

    Raises:
        ConfigError: an unknown weighting.
        DataError: more flat tokens than can be restored at once (`Forest.path_index`).
    """
    check_weighting(weighting)
    weights = forest.flat_stream("loss_weights").astype(np.float64)
    if weighting == "per_trajectory":
        return weights
    key, num_keys = forest.path_index, forest.num_tokens
    if weighting == "per_rollout":
        rollout_F = np.repeat(forest.rollout_of_trajectory, forest.path_lengths)
        _, key = np.unique(rollout_F * forest.num_tokens + forest.path_index, return_inverse=True)
        num_keys = len(key)
    return weights / np.maximum(np.bincount(key, weights=weights > 0, minlength=num_keys), 1)[key]


def token_weights(forest: "Forest", weighting: str) -> np.ndarray:
    """[T] float64, the sum of `flat_weights` over all trajectories through each tree token. Raises the same errors."""
    check_weighting(weighting)
    if forest.tree_streams and weighting != "per_rollout":  # all trajectories through a token agree
        weights = forest.tree_streams["loss_weights"].astype(np.float64)
        return weights if weighting == "once" else weights * forest.multiplicity
    return np.bincount(forest.path_index, weights=flat_weights(forest, weighting), minlength=forest.num_tokens)
