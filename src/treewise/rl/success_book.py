"""How likely tasks are to end in success: Beta posteriors with decay.

The book serves the branching rule `lcr` (its v), and scores its own predictions. It is saved with every checkpoint as
plain JSON.

Each task has pseudo-counts (a, b) of successes and failures. An observation of s successes in n trials makes
`a <- decay a + (1 - decay) a0 + s`, b alike with `n - s` (MoPPS, arXiv 2507.04632, section 4): old outcomes are those
of older policies, and count less. The prior (a0, b0) is the book's.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from annotated_types import Gt, Le, Lt

from treewise.errors import DataError, check_fields

FORMAT = 1
Positive = Annotated[float, Gt(0), Lt(math.inf)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BookSettings:
    """decay: factor on earlier counts at each observation; 1 keeps them. prior_successes, prior_failures: pseudo-counts
    of a task never tried. success_at: rewards from here on are successes.
    """

    decay: Annotated[float, Gt(0), Le(1)] = 0.95
    prior_successes: Positive = 1.0
    prior_failures: Positive = 1.0
    success_at: Annotated[float, Gt(-math.inf), Lt(math.inf)] = 0.5

    def __post_init__(self) -> None:
        check_fields(self)


class SuccessBook:
    """Posteriors by task.

    Parameters:
        settings: see `BookSettings`.
    """

    def __init__(self, settings: BookSettings | None = None) -> None:
        self.settings = settings or BookSettings()
        self._tasks: dict[str, tuple[float, float]] = {}
        self._squared = self._trials = 0.0  # errors of predictions of tasks that had been tried before, and how many

    # -- predictions --------------------------------------------------------------------------------------------------

    def counts(self, task: str) -> tuple[float, float]:
        """Pseudo-counts (a, b) of a task's Beta posterior."""
        return self._tasks.get(task, (self.settings.prior_successes, self.settings.prior_failures))

    def success(self, task: str) -> float:
        """The posterior mean, in 0..1."""
        a, b = self.counts(task)
        return a / (a + b)

    @property
    def brier(self) -> float:
        """The mean squared error of predictions against outcomes of 0 or 1, of tasks that had been tried before; NaN
        without any. Always predicting the overall rate p gives p (1 - p).
        """
        return self._squared / self._trials if self._trials else math.nan

    # -- observations -------------------------------------------------------------------------------------------------

    def observe(self, task: str, success: float | None, trials: int) -> None:
        """Adds the rollouts of one iteration: the ways that go on from the prompt are trials of the task, each of which
        counts by its value (`node_values`), so that a draw below which more was sampled does not count more. success:
        their mean; None without a reward.
        """
        if success is None or not trials:
            return
        predicted, successes = self.success(task), success * trials
        if task in self._tasks:
            self._trials += trials
            self._squared += successes * (1 - predicted) ** 2 + (trials - successes) * predicted**2
        keep, (a, b) = self.settings.decay, self.counts(task)
        a0, b0 = self.settings.prior_successes, self.settings.prior_failures
        self._tasks[task] = (
            keep * a + (1 - keep) * a0 + float(successes),
            keep * b + (1 - keep) * b0 + float(trials - successes),
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_state` gives an equal book, bit for bit."""
        return {
            "format": FORMAT,
            "settings": asdict(self.settings),
            "tasks": {key: list(counts) for key, counts in self._tasks.items()},
            "squared": self._squared,
            "trials": self._trials,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "SuccessBook":
        """A book as `state_dict` wrote it.

        Raises:
            DataError: another format, or a missing entry.
        """
        if state.get("format") != FORMAT:
            raise DataError(f"a success book of format {state.get('format')!r}; this version reads {FORMAT}.")
        try:
            book = cls(BookSettings(**state["settings"]))
            book._tasks = {key: (float(a), float(b)) for key, (a, b) in dict(state["tasks"]).items()}
            book._squared, book._trials = float(state["squared"]), float(state["trials"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not the state of a success book: {type(error).__name__}: {error}.") from None
        return book
