"""`gain`: items in the order of their angle concentration, from a Gaussian over ranks whose mean moves on (GAIN-RL,
2506.02281), and `gain_shuffled`, its control: the same moving Gaussian over ranks that were shuffled.

Items are ranked by intra + inter (`angles`), the highest first. With N items, an iteration draws without replacement in
proportion to `exp(-((rank - mean) / width)^2 / 2)`; the mean starts at 0, and after an iteration

    mean <- mean + step tanh(alpha (accuracy - beta)) + step tanh(alpha angle)

with the mean success and the mean angle concentration of what was drawn, within 0..N - 1. The paper draws a subset once
an epoch and moves then; an iteration is that here. Its width of 1,000 and step of 500 are of the 7,473 questions of
GSM8K; here both are shares of the pool, so that small pools have the same curriculum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treewise.errors import ConfigError, DataError
from treewise.rl.branching.protocol import require
from treewise.rl.curriculum.protocol import Chosen, Memory, Outcome, View, drawn_by_weight

_SHUFFLE = 5  # names the random stream of shuffled ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class GainSettings:
    """width, step: as shares of the pool. alpha: steepness; beta: the accuracy at which the mean stands still but for
    its angle term. force: run although the self-check says that angles predict nothing here.
    """

    width: float = 1000 / 7473
    step: float = 500 / 7473
    alpha: float = 2.0
    beta: float = 0.5
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "alpha"):
            require(0 < getattr(self, name) < np.inf, f"{name}={getattr(self, name)} must be positive and finite.")
        require(0 <= self.step < np.inf, f"step={self.step} must be finite and not negative.")
        require(0 <= self.beta <= 1, f"beta={self.beta} must lie in 0..1.")


def ranks_by_angle(scores: Sequence[float]) -> np.ndarray:
    """[N] int64, the rank of each item: 0 for the highest score; equal ones in their order.

    Raises:
        DataError: a score that is not finite; sorted, it would come first.
    """
    values = np.asarray(scores, dtype=np.float64)
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise DataError(f"item {wrong[0]}: its angle concentration is {values[wrong[0]]}; it cannot be ranked.")
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(-values, kind="stable")] = np.arange(len(values))
    return ranks


def gaussian_weights(ranks: np.ndarray, mean: float, width: float) -> np.ndarray:
    """[N] float64, up to a factor that is the same for all, so that far from the mean not all of them underflow."""
    exponent = -0.5 * ((ranks - mean) / width) ** 2
    weights: np.ndarray = np.exp(exponent - exponent.max())
    return weights


def moved_mean(mean: float, accuracy: float, angle: float, settings: GainSettings, size: int) -> float:
    """The mean after an iteration, in ranks."""
    step = settings.step * size
    moved = step * np.tanh(settings.alpha * (accuracy - settings.beta)) + step * np.tanh(settings.alpha * angle)
    return float(np.clip(mean + moved, 0, size - 1))


def shuffled_ranks(size: int, seed: int) -> np.ndarray:
    """[N] int64, ranks that have nothing to do with the items."""
    return np.random.default_rng([seed, _SHUFFLE]).permutation(size)


def by_angle(view: View, count: int, settings: GainSettings) -> Chosen:
    """A draw from the Gaussian."""
    return drawn_by_weight(view, count, _weights(ranks_by_angle(_scores(view)), view, settings))


def by_shuffled_rank(view: View, count: int, settings: GainSettings) -> Chosen:
    """A draw from the Gaussian over shuffled ranks."""
    return drawn_by_weight(view, count, _weights(shuffled_ranks(view.size or 0, view.seed), view, settings))


def gain_after(memory: Memory, outcomes: Sequence[Outcome], _num_kept: int, settings: GainSettings) -> dict[str, Any]:
    """The memory with the mean moved."""
    known = [each.success for each in outcomes if each.success is not None]
    angles = [each.angle for each in outcomes if each.angle is not None]
    if not known or not angles:
        return dict(memory)
    mean = moved_mean(
        memory.get("mean", 0.0), float(np.mean(known)), float(np.mean(angles)), settings, len(memory["scores"])
    )
    return {**memory, "mean": mean}


def _weights(ranks: np.ndarray, view: View, settings: GainSettings) -> np.ndarray:
    return gaussian_weights(ranks, view.memory.get("mean", 0.0), settings.width * len(ranks))


def _scores(view: View) -> list[float]:
    scores: list[float] | None = view.memory.get("scores")
    if scores is None or len(scores) != view.size:
        found = "none" if scores is None else f"{len(scores)}"
        raise ConfigError(f"gain needs the angle concentration of all {view.size} items, found {found}.")
    return scores
