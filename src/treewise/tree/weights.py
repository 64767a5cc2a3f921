"""How often a token that several trajectories share counts in a loss: the weightings of `Forest.flat_weights`.

`per_trajectory` leaves loss weights as they are, as flat training does. `once` divides each by the number of
trajectories that train its tree token, so that a shared token counts like any other: their mean. `per_rollout` divides
by the number of trajectories *of the same rollout* that train it, so that a rollout counts its tokens once, however its
rows overlap.

Letters: F flat tokens.
"""

import numpy as np

from treewise.errors import check_choice

WEIGHTINGS = ("per_trajectory", "once", "per_rollout")


def check_weighting(weighting: str) -> None:
    """Raises `ConfigError` for an unknown weighting."""
    if weighting not in WEIGHTINGS:
        check_choice("weighting", weighting, WEIGHTINGS)


def divided_by_counts(weights_F: np.ndarray, key_F: np.ndarray) -> np.ndarray:
    """[F] float64, each weight divided by the number of positive weights of the same key (an index from 0)."""
    return weights_F / np.maximum(np.bincount(key_F, weights=weights_F > 0), 1)[key_F]
