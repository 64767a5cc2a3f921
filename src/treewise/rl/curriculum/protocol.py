"""What a curriculum may look at when it chooses items, and what it is given when they were practised.

A rule is a pure function of a `View`; what it has learned is the view's `memory`, plain JSON values that every
checkpoint holds. So a resumed run draws what an undisturbed one would have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Memory = Mapping[str, Any]
_CHOICE = 1  # names the random stream of the choice of items


@dataclass(frozen=True, slots=True)
class View:
    """The state before a draw.

    size: of the pool of items; None: without end. position: items that passes have drawn so far. seed: of the run.
    iteration, wave: number of the draw; the waves of an iteration are its refills. taken: indices that this iteration
    has drawn already. counts: gives the book's pseudo-counts of all items, [size, 2] float64. memory: what the
    curriculum has learned.
    """

    size: int | None
    position: int
    seed: int
    iteration: int
    wave: int = 0
    taken: frozenset[int] = frozenset()
    counts: Callable[[], np.ndarray] = lambda: np.ones((0, 2))
    memory: Memory = field(default_factory=dict)

    @property
    def rng(self) -> np.random.Generator:
        """A generator of this draw's own, the same at every call."""
        return np.random.default_rng([self.seed, self.iteration, _CHOICE, *([self.wave] if self.wave else [])])

    def order_of_pass(self, number: int) -> np.ndarray:
        """[size] int64, all items in the order of one pass."""
        return np.random.default_rng([self.seed, number, _CHOICE]).permutation(self.size or 0)

    def is_free(self) -> np.ndarray:
        """[size] bool, the items that this iteration has not drawn."""
        free = np.ones(self.size or 0, dtype=bool)
        free[list(self.taken)] = False
        return free


@dataclass(frozen=True, slots=True)
class Chosen:
    """indices: different items, none of `View.taken`; fewer than asked for where there are no more. position: of the
    passes after this draw.
    """

    indices: list[int]
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One item that was practised.

    predicted: the book's probability of success before. rewards: of the rollouts that have one. success, trials: mean
    over the ways to go on from the prompt, 0..1, and how many these are; None, 0 without a reward. num_successes: of
    `rewards`, those that are successes. angle: angle concentration of the prompt under the present model, if it is
    measured.
    """

    index: int
    predicted: float
    rewards: tuple[float, ...]
    success: float | None
    trials: int
    num_successes: int
    angle: float | None = None

    @property
    def is_flat(self) -> bool:
        """Whether the rewards of the group are all equal, so that it teaches nothing."""
        return len(set(self.rewards)) < 2


Choose = Callable[[View, int, Any], Chosen]
Keep = Callable[[Outcome, Any], bool]
Learn = Callable[[Memory, Sequence[Outcome], int, Any], dict[str, Any]]


def drawn_by_weight(view: View, count: int, weights: np.ndarray, rng: np.random.Generator | None = None) -> Chosen:
    """Different items in proportion to weights, [size] float64, one after another.

    rng: the draw's, where something was drawn from it already. An item of weight 0 comes after all others; among those
    the draw is even.
    """
    free = np.flatnonzero(view.is_free())
    weights = weights[free]
    rng = view.rng if rng is None else rng
    positive = free[weights > 0]
    share = weights[weights > 0] / weights[weights > 0].sum() if len(positive) else None
    chosen = rng.choice(positive, size=min(count, len(positive)), replace=False, p=share).tolist() if count else []
    if len(chosen) < count:
        rest = free[weights <= 0]
        chosen += rng.choice(rest, size=min(count - len(chosen), len(rest)), replace=False).tolist()
    return Chosen([int(index) for index in chosen], view.position)


def uncertainty(counts: np.ndarray) -> np.ndarray:
    """p (1 - p) at the posterior means of pseudo-counts, [..., 2] float64: the variance of an outcome."""
    success: np.ndarray = counts[..., 0] / counts.sum(-1)
    return success * (1 - success)
