"""Supervised fine-tuning; and the weights and denominators of all losses, independent of packing, calls and ranks.

Where rollouts are counted (`rollout_mean`, `rollout_sum`, the weighting `per_rollout`), a rollout counts once, however
it was cut into rows, which share its id. Where the rows of one rollout are in several forests,
`Trajectory.rollout_weight` is the loss weight of all of them.

With w the weight of a token under a weighting, a loss is the sum of w * loss over tokens, divided as follows:

    token_mean       by the sum of w over the step
    trajectory_mean  by the sum of w of each trajectory, then by the number of trajectories
    rollout_mean     by the sum of w of each rollout, then by the number of rollouts
    rollout_sum      by `constant` (1 if None), then by the number of rollouts
    constant         by `constant`, however large the step is

Letters: F flat tokens, T tree tokens, N trajectories, R rollouts of the forest.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from treewise.base import features
from treewise.base.shapes import Float
from treewise.errors import ConfigError, DataError, check_choice
from treewise.objectives.protocol import Objective, Streams, Terms, Values
from treewise.tree.forest import WEIGHTINGS, Forest

NORMALIZATIONS = ("token_mean", "trajectory_mean", "rollout_mean", "rollout_sum", "constant")
# Fractions of a rollout's weight are compared in float64 sums of float32 weights.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class SFT:
    """Negative log-likelihood of the trained tokens.

    weighting: `per_trajectory` counts a shared trained token once for every trajectory that trains it, exactly as flat
    training does; `once` divides each weight by the number of trajectories that train the token, `per_rollout` by the
    number of those that are rows of one rollout.
    normalization, constant: see `treewise.objectives.sft`; none depends on how trees are packed.

    Raises:
        ConfigError: an unknown name, or a constant that is missing, not positive, or without use.
    """

    outputs: ClassVar[tuple[str, ...]] = ("log_probs",)

    weighting: str = "per_trajectory"
    normalization: str = "token_mean"
    constant: float | None = None

    def __post_init__(self) -> None:
        check_settings(self.weighting, self.normalization, self.constant)

    def denominator(self, forest: Forest) -> float:
        return denominator(forest, self.weighting, self.normalization, self.constant)

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


def check_settings(weighting: str, normalization: str, constant: float | None) -> None:
    """Raises `ConfigError` for an unknown name, or a constant that is missing, not positive, or without use."""
    if weighting not in WEIGHTINGS:
        check_choice("weighting", weighting, WEIGHTINGS)
    check_choice("normalization", normalization, NORMALIZATIONS)
    if constant is None and normalization == "constant":
        raise ConfigError("normalization='constant' needs constant=<a positive number>.")
    if constant is not None and normalization not in ("rollout_sum", "constant"):
        raise ConfigError(
            f"constant={constant} belongs to normalization 'rollout_sum' or 'constant', not {normalization!r}."
        )
    if constant is not None and not constant > 0:
        raise ConfigError(f"constant={constant} must be positive.")


def denominator(forest: Forest, weighting: str, normalization: str, constant: float | None) -> float:
    """The divisor of the sum over tokens of `normalized_weights` times losses.

    Additive over forests, except for `constant` (see `fixed_denominator`). A rollout of which this forest has some rows
    only counts as their fraction of its weight.
    """
    if normalization == "token_mean":
        return float(forest.token_weights(weighting).sum())
    if normalization == "trajectory_mean":
        return float(forest.num_trajectories)
    if normalization == "constant":
        assert constant is not None
        return float(constant)
    return float(_fractions(forest).sum()) * (constant or 1.0)


def fixed_denominator(objective: object) -> float | None:
    """The denominator of any number of forests together under normalization='constant'; None for all others, whose
    denominators add up over forests.
    """
    is_fixed = getattr(objective, "normalization", None) == "constant"
    return float(objective.constant) if is_fixed else None  # type: ignore[attr-defined]


def normalized_weights(forest: Forest, weighting: str, normalization: str) -> tuple[np.ndarray, np.ndarray]:
    """[F] float64 weights of the token losses, and the plain weights ([F], `Forest.flat_weights`) before normalization.

    The weights of each trajectory (`trajectory_mean`) or rollout (`rollout_mean`) add up to 1.

    Raises:
        DataError: `rollout_mean` of a part of a rollout under a weighting that needs all of it; more flat tokens than
            can be restored at once (`Forest.path_index`).
    """
    plain = forest.flat_weights(weighting)
    if normalization == "trajectory_mean":
        totals = np.add.reduceat(plain, forest.path_offsets[:-1])
        return plain / np.repeat(totals, forest.path_lengths), plain
    if normalization != "rollout_mean":
        return plain, plain
    fractions_R = _fractions(forest)
    if weighting != "per_trajectory" and (fractions_R < 1).any():
        raise DataError(
            f"weighting={weighting!r} with normalization='rollout_mean' needs all rows of a rollout in one call of the "
            f"engine, but {_first_part(forest, fractions_R)} has rows elsewhere."
        )
    rollout_F = rollout_of_tokens(forest)
    total_R = np.bincount(rollout_F, weights=plain) / fractions_R
    return plain / total_R[rollout_F], plain


def normalized_tree_weights(forest: Forest, weighting: str, normalization: str) -> np.ndarray:
    """[T] float64, for each tree token the sum of `normalized_weights` over the trajectories that contain it."""
    if normalization not in ("trajectory_mean", "rollout_mean"):
        return forest.token_weights(weighting)
    weights, _ = normalized_weights(forest, weighting, normalization)
    return np.bincount(forest.path_index, weights=weights, minlength=forest.num_tokens)


def rollout_of_tokens(forest: Forest) -> np.ndarray:
    """[F] int64, the rollout of each flat token."""
    return np.repeat(forest.rollout_of_trajectory, forest.path_lengths)


def require_whole_rollouts(forest: Forest, what: str) -> None:
    """Raises `DataError` where a rollout has rows outside of this forest. what: names the setting that needs them."""
    fractions_R = _fractions(forest)
    if (fractions_R < 1).any():
        raise DataError(
            f"{what} needs all rows of a rollout in one call, but {_first_part(forest, fractions_R)} has more."
        )


def _fractions(forest: Forest) -> np.ndarray:
    """[R] float64, the fraction of each rollout's weight in this forest; 1 unless `rollout_weight` is larger."""
    rollout_N = forest.rollout_of_trajectory
    weight_N = [item.weight for item in forest.trajectories]
    in_forest_R = np.bincount(rollout_N, weights=weight_N)
    whole_R = np.zeros(len(in_forest_R))
    np.maximum.at(whole_R, rollout_N, [item.rollout_weight or 0.0 for item in forest.trajectories])
    is_part = in_forest_R < whole_R * (1 - _ROUNDING)
    return np.divide(in_forest_R, whole_R, out=np.ones_like(in_forest_R), where=is_part)


def _first_part(forest: Forest, fractions_R: np.ndarray) -> str:
    item = forest.trajectories[int(np.argmax((fractions_R < 1)[forest.rollout_of_trajectory]))]
    return f"rollout {item.rollout!r} of group {item.group!r}"


# -- what is given as an objective ------------------------------------------------------------------------------------


def checked_objective(objective: object) -> Any:
    """The objective, `SFT()` for None.

    Raises:
        ConfigError: one that was not called (`tw.GRPO`), or is given by its name alone, or is no function either.
    """
    if objective is None:
        return SFT()
    if isinstance(objective, type | str):
        features.objectives.refuse_uncalled(objective)
    if isinstance(objective, type) or not (isinstance(objective, Objective) or callable(objective)):
        raise ConfigError(f"objective is {described(objective)}; give tw.SFT(), another objective, or a function.")
    return objective


def described(value: object) -> str:
    """A value in a message: a tensor by its shape, a class by its name, else its type."""
    if isinstance(value, Tensor):
        return f"one of shape {list(value.shape)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
