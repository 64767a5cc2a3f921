"""`TaskSampler`: which items a run practises next. A pure function of its state, which checkpoints hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treewise.errors import ConfigError, DataError
from treewise.rl.curriculum.rules import Choose, Curriculum, Outcome, View, ranks_by_angle
from treewise.rl.success_book import SuccessBook

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Pool:
    """What is drawn from. size: number of items; None: without end. key_of: how the book calls an item."""

    size: int | None
    key_of: Callable[[int], str]


class TaskSampler:
    """Draws items for iterations, wave by wave, and learns from their outcomes.

    Parameters:
        seed: of the run; names all random streams.

    Raises:
        ConfigError: a curriculum that ranks items, on a pool without end.
    """

    def __init__(self, curriculum: Curriculum, pool: Pool, seed: int) -> None:
        if curriculum.kind.needs_pool and pool.size is None:
            raise ConfigError(
                f"curriculum {curriculum.name!r} ranks the items of a pool, and this task makes new ones without end; "
                "give num_items, the number of items to practise."
            )
        self.curriculum, self.pool, self.seed = curriculum, pool, seed
        self.iteration = 0
        self.position = 0
        self.memory: dict[str, Any] = {}
        self._taken: list[int] = []
        self._wave = 0

    def begin(self, scores: Sequence[float], num_shared: int) -> None:
        """Takes the angle concentration of all items over, before the first draw.

        num_shared: tokens of the prefix that all prompts share.

        Raises:
            DataError: a score that is not finite.
        """
        ranks_by_angle(scores)
        self.memory = {"mean": 0.0, "num_shared": num_shared, "scores": [float(score) for score in scores]}

    def draw(self, count: int, book: SuccessBook) -> list[int]:
        """The first items of the next iteration: different ones, fewer than asked for where the pool has fewer."""
        self._taken, self._wave = [], 0
        return self._drawn(self.curriculum.kind.choose, count, book)

    def refill(self, count: int, book: SuccessBook) -> list[int]:
        """Further items of the iteration, in place of what is left out; empty where the curriculum replaces nothing."""
        rule = self.curriculum.kind.refill
        self._wave += 1
        if rule is None or self._wave > self.curriculum.settings.refills:
            return []
        return self._drawn(rule, count, book)

    def is_kept(self, outcome: Outcome) -> bool:
        """Whether the tree of an item is trained."""
        keep = self.curriculum.kind.keep
        return keep is None or keep(outcome)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Ends the iteration, of all of whose trees these are the outcomes."""
        learn = self.curriculum.kind.learn
        if learn is not None:
            self.memory = learn(self.memory, outcomes, self.curriculum.settings)
        self.iteration += 1
        self._taken, self._wave = [], 0

    def counts(self, book: SuccessBook) -> np.ndarray:
        """[size, 2] float64, the book's pseudo-counts of successes and failures of all items."""
        return np.array([book.counts(self.pool.key_of(index)) for index in range(self.pool.size or 0)]).reshape(-1, 2)

    def _drawn(self, rule: Choose, count: int, book: SuccessBook) -> list[int]:
        view = View(
            size=self.pool.size,
            position=self.position,
            seed=self.seed,
            iteration=self.iteration,
            wave=self._wave,
            taken=frozenset(self._taken),
            counts=lambda: self.counts(book),
            memory=self.memory,
        )
        chosen = rule(view, count, self.curriculum.settings)
        self.position = chosen.position
        self._taken += chosen.indices
        return chosen.indices

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values, between two iterations; `load_state_dict` goes on from them."""
        return {
            "format": FORMAT,
            "curriculum": self.curriculum.name,
            "iteration": self.iteration,
            "position": self.position,
            "memory": self.memory,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a saved state over.

        Raises:
            DataError: another format, another curriculum, or a missing entry.
        """
        if state.get("format") != FORMAT:
            raise DataError(f"a curriculum's state of format {state.get('format')!r}; this version reads {FORMAT}.")
        if state.get("curriculum") != self.curriculum.name:
            raise DataError(f"the state of curriculum {state.get('curriculum')!r}, not of {self.curriculum.name!r}.")
        try:
            self.iteration, self.position = int(state["iteration"]), int(state["position"])
            self.memory = dict(state["memory"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not the state of a curriculum: {type(error).__name__}: {error}.") from None
        self._taken, self._wave = [], 0
