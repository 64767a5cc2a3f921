"""Supervised fine-tuning."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from treewise.errors import ConfigError, DataError
from treewise.objectives.normalization import denominator, normalized_weights
from treewise.objectives.protocol import Streams, Terms, Values
from treewise.shapes import Float
from treewise.tree.forest import Forest
from treewise.tree.weights import check_weighting

NORMALIZATIONS = ("token_mean", "trajectory_mean", "rollout_mean", "constant")


@dataclass(frozen=True, slots=True)
class SFT:
    """Negative log-likelihood of the trained tokens.

    weighting: `per_trajectory` counts a shared trained token once for every trajectory that trains it, exactly as flat
    training does; `once` divides each weight by the number of trajectories that train the token, `per_rollout` by the
    number of those that are rows of one rollout.
    normalization: `token_mean` divides by the sum of all weights, `trajectory_mean` takes the mean over each
    trajectory's trained tokens and then over trajectories, `rollout_mean` the same with rollouts, however each was cut
    into trajectories; `constant` divides by `constant`. None depends on how trees are packed.

    Raises:
        ConfigError: an unknown name, or a constant that is missing or not positive.
    """

    weighting: str = "per_trajectory"
    normalization: str = "token_mean"
    constant: float | None = None

    def __post_init__(self) -> None:
        check_weighting(self.weighting)
        if self.normalization not in NORMALIZATIONS:
            raise ConfigError(
                f"normalization={self.normalization!r} is unknown; choose one of {', '.join(NORMALIZATIONS)}."
            )
        if (self.normalization == "constant") != (self.constant is not None):
            raise ConfigError("normalization='constant' and constant=<a positive number> go together.")
        if self.constant is not None and not self.constant > 0:
            raise ConfigError(f"constant={self.constant} must be positive.")

    def denominator(self, forest: Forest) -> float:
        if self.normalization == "token_mean":
            return float(forest.token_weights(self.weighting).sum())
        if self.normalization == "trajectory_mean":
            return float(forest.num_trajectories)
        if self.normalization == "rollout_mean":
            return denominator(forest, self.weighting, self.normalization, None)
        assert self.constant is not None
        return float(self.constant)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("log_probs",)

    def is_separable(self, forest: Forest) -> bool:
        return True

    def terms(self, forest: Forest) -> Terms:
        weights = self._token_weights(forest)
        positions = np.flatnonzero(weights)
        return Terms(positions, {"weights": weights[positions]})

    def token_losses(self, values: Values, streams: Streams) -> Float[Tensor, " P"]:
        return -streams["weights"] * values["log_probs"]

    def token_metrics(self, values: Values, streams: Streams) -> Values:
        return {}

    def _token_weights(self, forest: Forest) -> np.ndarray:
        if self.normalization == "rollout_mean":
            weights, _ = normalized_weights(forest, self.weighting, self.normalization)
            return np.bincount(forest.path_index, weights=weights, minlength=forest.num_tokens)
        if self.normalization != "trajectory_mean":
            return forest.token_weights(self.weighting)
        if forest.trajectories is None:
            raise DataError("trajectory_mean needs trajectories; this declared tree is too large to hold them flat.")
        weights = forest.flat_weights(self.weighting)
        totals = np.add.reduceat(weights, forest.path_offsets[:-1])
        weights /= np.repeat(totals, forest.path_lengths)
        return np.bincount(forest.path_index, weights=weights, minlength=forest.num_tokens)
