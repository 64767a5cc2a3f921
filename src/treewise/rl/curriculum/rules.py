"""Every curriculum by its name in a configuration: which items an online run practises next.

A rule is a pure function of a `View`; what it has learned is the view's `memory`, plain JSON values that every
checkpoint holds. So a resumed run draws what an undisturbed one would have.

`uniform`, the default and the baseline: every item once per pass, each pass in an order of its own.

`dynamic` draws so, too; groups without variance are left out and replaced by new ones, at most so many times (DAPO,
2503.14476, section 3.2). What the replaced ones cost is counted.

`learnability`: items in proportion to p (1 - p), the variance of their outcomes (2502.12272 ranks by it). p is the mean
of an item's posterior in the book, or with `thompson` a draw from it (as MoPPS, 2507.04632, draws), so that an item of
which little is known may come although its mean is near 0 or 1.

`gain`: items in the order of their angle concentration, from a Gaussian over ranks whose mean moves on (GAIN-RL,
2506.02281), and `gain_shuffled`, its control: the same moving Gaussian over ranks that were shuffled. Items are ranked
by intra + inter (`signals.py`), the highest first. With N items, an iteration draws without replacement in proportion
to `exp(-((rank - mean) / width)^2 / 2)`; the mean starts at 0, and after an iteration

    mean <- mean + step tanh(alpha (accuracy - beta)) + step tanh(alpha angle)

with the mean success and the mean angle concentration of what was drawn, within 0..N - 1. The paper draws a subset once
an epoch and moves then; an iteration is that here. Its width of 1,000 and step of 500 are of the 7,473 questions of
GSM8K; here both are shares of the pool, so that small pools have the same curriculum.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from treewise.errors import ConfigError, DataError, check_setting_types, did_you_mean
from treewise.rl.branching.protocol import require

Memory = Mapping[str, Any]
# Names of random streams.
_CHOICE, _SHUFFLE = 1, 5


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


def is_varied(outcome: Outcome) -> bool:
    """Whether the rewards of a group differ; otherwise it teaches nothing."""
    return len(set(outcome.rewards)) > 1


def drawn_by_weight(view: View, count: int, weights: np.ndarray, rng: np.random.Generator | None = None) -> Chosen:
    """Different items in proportion to weights, [size] float64, one after another.

    rng: the draw's, where something was drawn from it already. An item of weight 0 comes after all others; among those
    the draw is even.
    """
    free = np.setdiff1d(np.arange(view.size or 0), list(view.taken))
    weights = weights[free]
    rng = view.rng if rng is None else rng
    positive = free[weights > 0]
    share = weights[weights > 0] / weights[weights > 0].sum() if len(positive) else None
    chosen = rng.choice(positive, size=min(count, len(positive)), replace=False, p=share).tolist() if count else []
    if len(chosen) < count:
        rest = free[weights <= 0]
        chosen += rng.choice(rest, size=min(count - len(chosen), len(rest)), replace=False).tolist()
    return Chosen([int(index) for index in chosen], view.position)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformSettings:
    """There is nothing to set."""


def in_passes(view: View, count: int, _settings: object = None) -> Chosen:
    """The next items of the present pass. Where a pass ends within an iteration, an item that comes again at once is
    passed over. Items without end come in their order.
    """
    if view.size is None:
        return Chosen(list(range(view.position, view.position + count)), view.position + count)
    chosen: list[int] = []
    position, taken = view.position, set(view.taken)
    while len(chosen) < count and len(taken) < view.size:
        order = np.random.default_rng([view.seed, position // view.size, _CHOICE]).permutation(view.size)
        index = int(order[position % view.size])
        if index not in taken:
            chosen.append(index)
            taken.add(index)
        position += 1
    return Chosen(chosen, position)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSettings:
    """refills: times that missing groups are sampled anew in one iteration. What is still missing then is left out, so
    that an iteration of a task that is all too hard or too easy ends.
    """

    refills: int = 3

    def __post_init__(self) -> None:
        require(self.refills >= 0, f"refills={self.refills} must not be negative.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnabilitySettings:
    """thompson: p is drawn from each item's posterior instead of being its mean. The book's are `book_settings`."""

    thompson: bool = False


def by_learnability(view: View, count: int, settings: LearnabilitySettings) -> Chosen:
    """Different items, drawn one after another in proportion to p (1 - p)."""
    counts, rng = view.counts(), view.rng
    rates = rng.beta(counts[:, 0], counts[:, 1]) if settings.thompson else counts[:, 0] / counts.sum(-1)
    return drawn_by_weight(view, count, rates * (1 - rates), rng)


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


def shuffled_ranks(size: int, seed: int) -> np.ndarray:
    """[N] int64, ranks that have nothing to do with the items."""
    return np.random.default_rng([seed, _SHUFFLE]).permutation(size)


def by_angle(view: View, count: int, settings: GainSettings) -> Chosen:
    """A draw from the Gaussian."""
    scores: list[float] | None = view.memory.get("scores")
    if scores is None or len(scores) != view.size:
        found = "none" if scores is None else f"{len(scores)}"
        raise ConfigError(f"gain needs the angle concentration of all {view.size} items, found {found}.")
    return _by_rank(view, count, ranks_by_angle(scores), settings)


def by_shuffled_rank(view: View, count: int, settings: GainSettings) -> Chosen:
    """A draw from the Gaussian over shuffled ranks."""
    return _by_rank(view, count, shuffled_ranks(view.size or 0, view.seed), settings)


def _by_rank(view: View, count: int, ranks: np.ndarray, settings: GainSettings) -> Chosen:
    exponent = -0.5 * ((ranks - view.memory.get("mean", 0.0)) / (settings.width * len(ranks))) ** 2
    # Up to a factor that is the same for all, so that far from the mean not all of them underflow.
    return drawn_by_weight(view, count, np.exp(exponent - exponent.max()))


def gain_after(memory: Memory, outcomes: Sequence[Outcome], settings: GainSettings) -> dict[str, Any]:
    """The memory with the mean moved."""
    known = [each.success for each in outcomes if each.success is not None]
    angles = [each.angle for each in outcomes if each.angle is not None]
    if not known or not angles:
        return dict(memory)
    size = len(memory["scores"])
    step, alpha = settings.step * size, settings.alpha
    moved = step * np.tanh(alpha * (np.mean(known) - settings.beta)) + step * np.tanh(alpha * np.mean(angles))
    return {**memory, "mean": float(np.clip(memory.get("mean", 0.0) + moved, 0, size - 1))}


Choose = Callable[[View, int, Any], Chosen]


class CurriculumKind(NamedTuple):
    """settings: a frozen dataclass. choose: the first items of an iteration. refill: those that replace what `keep`
    leaves out. keep: which trees are trained. learn: the memory after an iteration. needs_pool: whether it ranks the
    items of a pool, which must have an end. measures_angles: whether it needs the angles of all items, and at
    each iteration those of what was drawn.
    """

    settings: type
    choose: Choose
    refill: Choose | None = None
    keep: Callable[[Outcome], bool] | None = None
    learn: Callable[[Memory, Sequence[Outcome], Any], dict[str, Any]] | None = None
    needs_pool: bool = False
    measures_angles: bool = False


CURRICULA: Mapping[str, CurriculumKind] = {
    "uniform": CurriculumKind(UniformSettings, in_passes),
    "dynamic": CurriculumKind(DynamicSettings, in_passes, refill=in_passes, keep=is_varied),
    "learnability": CurriculumKind(LearnabilitySettings, by_learnability, needs_pool=True),
    "gain": CurriculumKind(GainSettings, by_angle, learn=gain_after, needs_pool=True, measures_angles=True),
    "gain_shuffled": CurriculumKind(
        GainSettings, by_shuffled_rank, learn=gain_after, needs_pool=True, measures_angles=True
    ),
}
# Names of earlier versions, and what to use in their place.
GONE: Mapping[str, str] = {
    "mopps": "learnability, with curriculum_settings.thompson=true",
    "vcrl": "dynamic",
    "speed": "dynamic",
    "gain_x_learnability": "gain or learnability",
}


@dataclass(frozen=True, slots=True)
class Curriculum:
    """A curriculum with its settings; make one with `curriculum_named`."""

    name: str
    settings: Any

    @property
    def kind(self) -> CurriculumKind:
        """Its rules."""
        return CURRICULA[self.name]


def curriculum_named(name: str, **settings: object) -> Curriculum:
    """The curriculum of a configuration: `curriculum_named("learnability", thompson=True)`. Hyphens count as
    underscores.

    Raises:
        ConfigError: an unknown name or setting, or a value that is out of range or of another type.
    """
    own = name.replace("-", "_")
    if own in GONE:
        raise ConfigError(f"curriculum {name!r} is gone; use {GONE[own]}.")
    if own not in CURRICULA:
        raise ConfigError(f"unknown curriculum {name!r}.{did_you_mean(own, CURRICULA)} Known: {', '.join(CURRICULA)}.")
    make = CURRICULA[own].settings
    check_setting_types(f"curriculum {name!r}", settings, {each.name: each.type for each in fields(make)})
    return Curriculum(own, make(**settings))
