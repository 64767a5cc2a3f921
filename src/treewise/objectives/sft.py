"""Supervised fine-tuning."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from treewise.objectives.normalization import check_settings, denominator, normalized_tree_weights
from treewise.objectives.protocol import Streams, Terms, Values
from treewise.shapes import Float
from treewise.tree.forest import Forest


@dataclass(frozen=True, slots=True)
class SFT:
    """Negative log-likelihood of the trained tokens.

    weighting: `per_trajectory` counts a shared trained token once for every trajectory that trains it, exactly as flat
    training does; `once` divides each weight by the number of trajectories that train the token, `per_rollout` by the
    number of those that are rows of one rollout.
    normalization, constant: see `treewise.objectives.normalization`; none depends on how trees are packed.

    Raises:
        ConfigError: an unknown name, or a constant that is missing, not positive, or without use.
    """

    weighting: str = "per_trajectory"
    normalization: str = "token_mean"
    constant: float | None = None

    def __post_init__(self) -> None:
        check_settings(self.weighting, self.normalization, self.constant)

    def denominator(self, forest: Forest) -> float:
        return denominator(forest, self.weighting, self.normalization, self.constant)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("log_probs",)

    def is_separable(self, forest: Forest) -> bool:
        return True

    def terms(self, forest: Forest) -> Terms:
        weights = normalized_tree_weights(forest, self.weighting, self.normalization)
        positions = np.flatnonzero(weights)
        return Terms(positions, {"weights": weights[positions]})

    def token_losses(self, values: Values, streams: Streams) -> Float[Tensor, " P"]:
        """[P] float losses. values: `log_probs` [P]. streams: `weights` [P]."""
        return -streams["weights"] * values["log_probs"]

    def token_metrics(self, values: Values, streams: Streams) -> Values:
        return {}
