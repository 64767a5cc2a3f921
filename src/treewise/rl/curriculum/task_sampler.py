"""`TaskSampler`: which items an online run practises next, by the curricula of a configuration.

A draw is a pure function of the sampler's state, which checkpoints hold; so a resumed run draws what an undisturbed one
would have.

`uniform`, the default and the baseline: every item once per pass, each pass in an order of its own.

`dynamic` draws so, too; groups without variance are left out and replaced by new ones, at most so many times (DAPO,
2503.14476, section 3.2). What the replaced ones cost is counted.

`gain`: items in the order of their angle concentration, from a Gaussian over ranks whose mean moves on (GAIN-RL,
2506.02281), and with `control` the same moving Gaussian over ranks that have nothing to do with the items. Items are
ranked by intra + inter (`signals.py`), the highest first. With N items, an iteration draws without replacement in
proportion to `exp(-((rank - mean) / width)^2 / 2)`; the mean starts at 0, and after an iteration

    mean <- mean + step tanh(alpha (accuracy - beta)) + step tanh(alpha angle)

with the mean success and the mean angle concentration of what was drawn, within 0..N - 1. The paper draws a subset once
an epoch and moves then; an iteration is that here. Its width of 1,000 and step of 500 are of the 7,473 questions of
GSM8K; here both are shares of the pool, so that small pools have the same curriculum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from treewise.base.arrays import Floats
from treewise.base.given_settings import settings_named
from treewise.errors import ConfigError, DataError

FORMAT = 1
_CHOICE, _SHUFFLE = 1, 5  # name random streams


class _Settings:
    """refills: waves that may stand in place of what is left out of an iteration. needs_variance: groups whose rewards
    are all equal are left out. measures_angles: it ranks items by their angles."""

    __slots__ = ()
    refills: int = 0
    needs_variance: ClassVar[bool] = False
    measures_angles: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformSettings(_Settings):
    """There is nothing to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSettings(_Settings):
    """refills: times that missing groups are sampled anew in one iteration. What is still missing then is left out, so
    that an iteration of a task that is all too hard or too easy ends.
    """

    refills: Annotated[int, Ge(0)] = 3

    needs_variance: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GainSettings(_Settings):
    """width, step: as shares of the pool. alpha: steepness; beta: the accuracy at which the mean stands still but for
    its angle term. force: run although the self-check says that angles predict nothing here. control: ranks are
    shuffled, to compare with.
    """

    width: Annotated[float, Gt(0), Lt(math.inf)] = 1000 / 7473
    step: Annotated[float, Ge(0), Lt(math.inf)] = 500 / 7473
    alpha: Annotated[float, Gt(0), Lt(math.inf)] = 2.0
    beta: Annotated[float, Ge(0), Le(1)] = 0.5
    force: bool = False
    control: bool = False

    measures_angles: ClassVar[bool] = True


CURRICULA: Mapping[str, type[_Settings]] = {
    "uniform": UniformSettings,
    "dynamic": DynamicSettings,
    "gain": GainSettings,
}


@dataclass(frozen=True, slots=True)
class Curriculum:
    """A curriculum with its settings; make one with `curriculum_named`."""

    name: str
    settings: Any

    @property
    def measures_angles(self) -> bool:
        """Whether it needs the angles of all items, and at each iteration those of what was drawn."""
        found: bool = self.settings.measures_angles
        return found


def curriculum_named(name: str, **settings: object) -> Curriculum:
    """The curriculum of a configuration: `curriculum_named("dynamic", refills=2)`. Raises as `settings_named`."""
    return Curriculum(name, settings_named("curriculum", name, CURRICULA, settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class PractisedItem:
    """One item that was practised.

    predicted: the book's probability of success before. rewards: of the rollouts that have one. success, trials: mean
    over the ways to go on from the prompt, 0..1, and how many these are; None, 0 without a reward. angle: angle
    concentration of the prompt under the present model, if it is measured.
    """

    index: int
    predicted: float
    rewards: tuple[float, ...]
    success: float | None
    trials: int
    angle: float | None = None


class TaskSampler:
    """Draws items for iterations, wave by wave, and learns from their outcomes.

    Parameters:
        size: of the pool of items; None: without end.
        seed: of the run; names all random streams.

    Raises:
        ConfigError: a curriculum that ranks items, on a pool without end.
    """

    def __init__(self, curriculum: Curriculum, size: int | None, seed: int) -> None:
        if size is None and curriculum.measures_angles:
            raise ConfigError(
                f"curriculum {curriculum.name!r} ranks the items of a pool, and this task makes new ones without end; "
                "give num_items, the number of items to practise."
            )
        self.curriculum, self.size, self.seed = curriculum, size, seed
        self.iteration = self.position = 0  # items that passes have drawn
        self.memory: dict[str, Any] = {}  # what it has learned, plain JSON values
        self._taken: list[int] = []  # of this iteration

    def begin(self, scores: Sequence[float], num_shared: int) -> None:
        """Takes the angle concentration of all items over, before the first draw.

        num_shared: tokens of the prefix that all prompts share.
        """
        self.memory = {"mean": 0.0, "num_shared": num_shared, "scores": [float(score) for score in scores]}

    def draw(self, count: int, wave: int = 0) -> list[int]:
        """Different items, fewer than asked for where the pool has fewer. Wave 0 begins the next iteration; later ones
        stand in place of what is left out of it, and are empty where the curriculum replaces no more.
        """
        if wave == 0:
            self._taken = []
        elif wave > self.curriculum.settings.refills:
            return []
        if self.curriculum.measures_angles:
            rng = np.random.default_rng([self.seed, self.iteration, _CHOICE, *([wave] if wave else [])])
            indices = self._by_weight(count, self._gaussian(), rng)
        else:
            indices = self._in_passes(count)
        self._taken += indices
        return indices

    def is_kept(self, rewards: Sequence[float]) -> bool:
        """Whether the tree of these rewards is trained; where the curriculum needs a variance, if they differ."""
        return not self.curriculum.settings.needs_variance or len(set(rewards)) > 1

    def observe(self, outcomes: Sequence[PractisedItem]) -> None:
        """Ends the iteration, of all of whose trees these are the outcomes."""
        known = [outcome.success for outcome in outcomes if outcome.success is not None]
        angles = [outcome.angle for outcome in outcomes if outcome.angle is not None]
        if self.curriculum.measures_angles and known and angles:
            settings, size = self.curriculum.settings, len(self.memory["scores"])
            tanhs = np.tanh(settings.alpha * np.array([np.mean(known) - settings.beta, np.mean(angles)]))
            mean = float(self.memory.get("mean", 0.0)) + settings.step * size * float(tanhs.sum())
            self.memory = {**self.memory, "mean": float(np.clip(mean, 0, size - 1))}
        self.iteration += 1

    def _in_passes(self, count: int) -> list[int]:
        """The next items of the present pass. Where a pass ends within an iteration, an item that comes again at once
        is passed over. Items without end come in their order.
        """
        if self.size is None:
            self.position += count
            return list(range(self.position - count, self.position))
        chosen: list[int] = []
        while len(chosen) < count and len(self._taken) + len(chosen) < self.size:
            order = np.random.default_rng([self.seed, self.position // self.size, _CHOICE]).permutation(self.size)
            index = int(order[self.position % self.size])
            if index not in self._taken and index not in chosen:
                chosen.append(index)
            self.position += 1
        return chosen

    def _by_weight(self, count: int, weights: np.ndarray, rng: np.random.Generator) -> list[int]:
        """Different items in proportion to weights, [size] float64, one after another. An item of weight 0 comes after
        all others; among those the draw is even.
        """
        free = np.setdiff1d(np.arange(self.size or 0), self._taken)
        weights = weights[free]
        positive, rest = free[weights > 0], free[weights <= 0]
        share = weights[weights > 0] / weights[weights > 0].sum() if len(positive) else None
        chosen = rng.choice(positive, size=min(count, len(positive)), replace=False, p=share).tolist() if count else []
        if len(chosen) < count:
            chosen += rng.choice(rest, size=min(count - len(chosen), len(rest)), replace=False).tolist()
        return [int(index) for index in chosen]

    def _gaussian(self) -> np.ndarray:
        """[size] float64, the Gaussian over ranks."""
        scores: list[float] = self.memory.get("scores", [])
        if len(scores) != self.size:
            found = len(scores) or "none"
            raise ConfigError(f"gain needs the angle concentration of all {self.size} items, found {found}.")
        settings = self.curriculum.settings
        ranks = shuffled_ranks(len(scores), self.seed) if settings.control else ranks_by_angle(scores)
        width = settings.width * len(ranks)
        mean: float = self.memory.get("mean", 0.0)
        exponent: Floats = -0.5 * ((ranks - mean) / width) ** 2
        # Up to a factor that is the same for all, so that far from the mean not all of them underflow.
        return np.asarray(np.exp(exponent - exponent.max()))

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, between two iterations; `load_state_dict` goes on from them."""
        own = {name: getattr(self, name) for name in ("iteration", "position", "memory")}
        return {"format": FORMAT, "curriculum": self.curriculum.name, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a saved state over.

        Raises:
            DataError: another format, or a missing entry.
        """
        if state.get("format") != FORMAT:
            raise DataError(f"a curriculum's state of format {state.get('format')!r}; this version reads {FORMAT}.")
        try:
            self.iteration, self.position = int(state["iteration"]), int(state["position"])
            self.memory = dict(state["memory"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not the state of a curriculum: {type(error).__name__}: {error}.") from None


def ranks_by_angle(scores: Sequence[float]) -> np.ndarray:
    """[N] int64, the rank of each item: 0 for the highest score; equal ones in their order."""
    return np.argsort(np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable"), kind="stable")


def shuffled_ranks(size: int, seed: int) -> np.ndarray:
    """[N] int64, ranks that have nothing to do with the items."""
    return np.random.default_rng([seed, _SHUFFLE]).permutation(size)
