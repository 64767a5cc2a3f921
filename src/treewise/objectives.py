"""Losses on restored trajectories.

An objective never sees the tree: it says which tokens it needs, hands over per-token streams, and maps log-probs to
losses, as it would for flat trajectories. Restoring is a gather, and the transpose of that gather is gradient
restoration (Tree Training, arXiv 2511.00413), so what is exact on flat trajectories is exact on trees.

A *separable* objective is a sum over tokens whose terms depend on one log-prob each; it needs a single pass over a
partitioned forest. Letters: T tree tokens, F flat tokens, P terms.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from treewise.errors import ConfigError, DataError
from treewise.forest import Forest

WEIGHTINGS = ("per_trajectory", "once")
NORMALIZATIONS = ("token_mean", "trajectory_mean", "constant")


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a separable loss: the tree position of each term's token ([P] int64, ascending), and its streams
    ([P]).
    """

    positions: np.ndarray
    streams: dict[str, np.ndarray]


@runtime_checkable
class SeparableObjective(Protocol):
    """A loss that is a sum over tokens, each term a function of that token's log-prob."""

    def denominator(self, forest: Forest) -> float:
        """What the sum of terms is divided by; additive over forests."""
        ...

    def terms(self, forest: Forest) -> Terms:
        """Which tokens are trained, with everything that `token_losses` needs."""
        ...

    def token_losses(self, logprobs: torch.Tensor, streams: dict[str, torch.Tensor]) -> torch.Tensor:
        """[P] losses from [P] log-probs, before the division."""
        ...


@dataclass(frozen=True, slots=True)
class SFT:
    """Negative log-likelihood of the trained tokens.

    weighting: `per_trajectory` counts a shared trained token once for every trajectory that trains it, exactly as flat
    training does; `once` divides each weight by the number of trajectories that train the token.
    normalization: `token_mean` divides by the sum of all weights, `trajectory_mean` takes the mean over each
    trajectory's trained tokens and then over trajectories, `constant` divides by `constant`. None depends on how trees
    are packed.

    Raises:
        ConfigError: an unknown name, or a constant that is missing or not positive.
    """

    weighting: str = "per_trajectory"
    normalization: str = "token_mean"
    constant: float | None = None

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise ConfigError(f"weighting={self.weighting!r} is unknown; choose one of {', '.join(WEIGHTINGS)}.")
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
        assert self.constant is not None
        return float(self.constant)

    def terms(self, forest: Forest) -> Terms:
        weights = self._token_weights(forest)
        positions = np.flatnonzero(weights)
        return Terms(positions, {"weights": weights[positions]})

    def token_losses(self, logprobs: torch.Tensor, streams: dict[str, torch.Tensor]) -> torch.Tensor:
        return -streams["weights"] * logprobs

    def _token_weights(self, forest: Forest) -> np.ndarray:
        if self.normalization != "trajectory_mean":
            return forest.token_weights(self.weighting)
        if forest.trajectories is None:
            raise DataError("trajectory_mean needs trajectories; this declared tree is too large to hold them flat.")
        weights = forest.flat_weights(self.weighting)
        totals = np.add.reduceat(weights, forest.path_offsets[:-1])
        weights /= np.repeat(totals, forest.path_lengths)
        return np.bincount(forest.path_index, weights=weights, minlength=forest.num_tokens)
