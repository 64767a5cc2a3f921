"""How a sum over tokens becomes a mean, the same for any packing, number of calls and ranks.

What is counted is the rollout: rows that share a rollout id are normalised together, however it was cut. Where the rows
of one rollout lie in several forests, `Trajectory.rollout_weight` says what the whole of it weighs.

Letters: F flat tokens, N trajectories, R rollouts of the forest.
"""

import numpy as np

from treewise.errors import ConfigError, DataError
from treewise.tree.forest import Forest
from treewise.tree.weights import check_weighting

NORMALIZATIONS = ("token_mean", "rollout_mean", "rollout_sum")
# Shares of a rollout's weight are compared in float64 sums of float32 weights.
_ROUNDING = 1e-6


def check_settings(weighting: str, normalization: str, constant: float | None) -> None:
    """Raises `ConfigError` for names that are unknown, or a constant that does not belong there."""
    check_weighting(weighting)
    if normalization not in NORMALIZATIONS:
        raise ConfigError(f"normalization={normalization!r} is unknown; choose one of {', '.join(NORMALIZATIONS)}.")
    if constant is not None and normalization != "rollout_sum":
        raise ConfigError(f"constant={constant} belongs to normalization='rollout_sum', not {normalization!r}.")
    if constant is not None and not constant > 0:
        raise ConfigError(f"constant={constant} must be positive.")


def denominator(forest: Forest, weighting: str, normalization: str, constant: float | None) -> float:
    """What the sum over tokens of `normalized_weights` times losses is divided by; additive over forests.

    token_mean: the sum of all weights. rollout_mean: the number of rollouts. rollout_sum: that times `constant`. A
    rollout of which this forest holds a part counts as that part of its weight.
    """
    if normalization == "token_mean":
        return float(forest.token_weights(weighting).sum())
    return float(_shares(forest).sum()) * (constant or 1.0)


def normalized_weights(forest: Forest, weighting: str, normalization: str) -> tuple[np.ndarray, np.ndarray]:
    """[F] float64 weights of the token losses, and the plain weights (`Forest.flat_weights`) that they come from.

    For `rollout_mean` the weights of each rollout add up to 1.

    Raises:
        DataError: `rollout_mean` of a part of a rollout under a weighting that has to see all of it.
    """
    plain = forest.flat_weights(weighting)
    if normalization != "rollout_mean":
        return plain, plain
    shares_R = _shares(forest)
    if weighting != "per_trajectory" and (shares_R < 1).any():
        raise DataError(
            f"weighting={weighting!r} with normalization='rollout_mean' needs all rows of a rollout in one call of the "
            f"engine, but {_first_part(forest, shares_R)} has rows elsewhere."
        )
    rollout_F = rollout_of_tokens(forest)
    total_R = np.bincount(rollout_F, weights=plain) / shares_R
    return plain / total_R[rollout_F], plain


def rollout_of_tokens(forest: Forest) -> np.ndarray:
    """[F] int64, the rollout of every flat token."""
    return np.repeat(forest.rollout_of_trajectory, forest.path_lengths)


def require_whole_rollouts(forest: Forest, what: str) -> None:
    """Raises `DataError` where a rollout is known to have rows outside of this forest."""
    shares_R = _shares(forest)
    if (shares_R < 1).any():
        raise DataError(
            f"{what} needs all rows of a rollout in one call, but {_first_part(forest, shares_R)} has more."
        )


def _shares(forest: Forest) -> np.ndarray:
    """[R] float64, how much of each rollout's weight lies in this forest: 1 unless a row knows of more."""
    number_N = forest.rollout_of_trajectory
    if forest.trajectories is None:
        return np.ones(int(number_N.max()) + 1)
    own_N = [item.weight for item in forest.trajectories]
    here_R = np.bincount(number_N, weights=own_N)
    whole_R = np.zeros(len(here_R))
    known_N = [item.rollout_weight or 0.0 for item in forest.trajectories]
    np.maximum.at(whole_R, number_N, known_N)
    is_part = here_R < whole_R * (1 - _ROUNDING)
    return np.divide(here_R, whole_R, out=np.ones_like(here_R), where=is_part)


def _first_part(forest: Forest, shares_R: np.ndarray) -> str:
    assert forest.trajectories is not None
    item = forest.trajectories[int(np.argmax((shares_R < 1)[forest.rollout_of_trajectory]))]
    return f"rollout {item.rollout!r} of group {item.group!r}"
