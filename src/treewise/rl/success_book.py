"""How likely tasks, and the branch points of their rollout trees, are to end in success: Beta posteriors with decay.

One book serves the branching rule `lcr` (its v) and the choice of tasks (learnability, `p (1 - p)`), and scores its own
predictions. It is saved with every checkpoint as plain JSON.

Each key holds pseudo-counts (a, b) of successes and failures. An observation of s successes in n trials makes
`a <- decay a + (1 - decay) a0 + s`, b alike with `n - s` (MoPPS, arXiv 2507.04632, section 4): old outcomes are those
of older policies, and count less. The prior (a0, b0) of a task is the book's; of a branch point it is `node_strength`
trials at the task's own mean.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from treewise.errors import DataError, check_fields
from treewise.rl.branching.protocol import Kind, Signals, points_of
from treewise.rl.branching.rollout_tree import RolloutTree
from treewise.rl.node_values import node_values

FORMAT = 1
Positive = Annotated[float, Gt(0), Lt(math.inf)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BookSettings:
    """decay: factor on earlier counts at each observation; 1 keeps them. prior_successes, prior_failures: pseudo-counts
    of a task never tried. node_strength: trials that the task's mean is worth as the prior of a branch point.
    success_at: rewards from here on are successes. max_nodes: branch points kept; the longest unobserved go first.
    """

    decay: Annotated[float, Gt(0), Le(1)] = 0.95
    prior_successes: Positive = 1.0
    prior_failures: Positive = 1.0
    node_strength: Positive = 4.0
    success_at: Annotated[float, Gt(-math.inf), Lt(math.inf)] = 0.5
    max_nodes: Annotated[int, Ge(0)] = 100_000

    def __post_init__(self) -> None:
        check_fields(self)


class SuccessBook:
    """Posteriors by task and by branch point.

    Parameters:
        settings: see `BookSettings`.
    """

    def __init__(self, settings: BookSettings | None = None) -> None:
        self.settings = settings or BookSettings()
        self._tasks: dict[str, tuple[float, float]] = {}
        self._nodes: dict[str, tuple[float, float]] = {}  # in the order of their last observation
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

    def signals(self, task: str, tree: RolloutTree, points: Kind = "turns") -> Signals:
        """What a branching policy gets of a growing tree: the task, and the branch points met before.

        The book must not have observed the tree's own rollouts: `lcr` counts these itself.

        points: the branch points that are looked up.
        """
        known = {}
        for root in tree.roots if self._nodes else ():
            for node, position, _ in points_of(tree, root, points):
                counts = self._nodes.get(_node_key(task, tree.prefix_ids(node, position)))
                if counts is not None:
                    known[node, position] = counts[0] / sum(counts)
        return Signals(self.success(task), known)

    # -- observations -------------------------------------------------------------------------------------------------

    def observe(self, task: str, successes: float, trials: float) -> None:
        """Adds the outcomes of independent rollouts of a task."""
        if not trials:
            return
        predicted = self.success(task)
        if task in self._tasks:
            self._trials += trials
            self._squared += successes * (1 - predicted) ** 2 + (trials - successes) * predicted**2
        prior = (self.settings.prior_successes, self.settings.prior_failures)
        self._tasks[task] = self._decayed(self.counts(task), prior, successes, trials)

    def observe_node(self, task: str, prefix_ids: np.ndarray, successes: float, trials: float) -> None:
        """Adds the outcomes of independent rollouts from a branch point."""
        if not trials:
            return
        mean, strength = self.success(task), self.settings.node_strength
        prior = (strength * mean, strength * (1 - mean))
        key = _node_key(task, prefix_ids)
        counts = self._decayed(self._nodes.pop(key, prior), prior, successes, trials)
        self._nodes[key] = counts
        while len(self._nodes) > self.settings.max_nodes:
            del self._nodes[next(iter(self._nodes))]

    def observe_tree(self, task: str, tree: RolloutTree) -> None:
        """Adds a finished tree: its roots are trials of the task, the ways that go on from a fork are trials of it.

        Each counts by its value (`node_values`), so that a draw below which more was sampled does not count more.
        Rollouts without a reward are not trials.
        """
        prompt, *segments = node_values(tree, self.settings.success_at)
        if prompt.value is not None:
            self.observe(task, prompt.value * prompt.num_draws, prompt.num_draws)
        for each in segments:
            if each.num_draws >= 2 and each.value is not None:
                prefix = tree.prefix_ids(each.node, each.end)
                self.observe_node(task, prefix, each.value * each.num_draws, each.num_draws)

    def _decayed(
        self, counts: tuple[float, float], prior: tuple[float, float], successes: float, trials: float
    ) -> tuple[float, float]:
        keep = self.settings.decay
        a, b = (keep * count + (1 - keep) * before for count, before in zip(counts, prior, strict=True))
        return a + float(successes), b + float(trials - successes)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_state` gives an equal book, bit for bit."""
        return {
            "format": FORMAT,
            "settings": asdict(self.settings),
            "tasks": {key: list(counts) for key, counts in self._tasks.items()},
            "nodes": [[key, *counts] for key, counts in self._nodes.items()],
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
            book._tasks = {key: (float(a), float(b)) for key, (a, b) in state["tasks"].items()}
            book._nodes = {key: (float(a), float(b)) for key, a, b in state["nodes"]}
            trials = state["trials"] if "trials" in state else sum(state["bins"][0])  # as earlier versions wrote them
            book._squared, book._trials = float(state["squared"]), float(trials)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not the state of a success book: {type(error).__name__}: {error}.") from None
        return book


def _node_key(task: str, prefix_ids: np.ndarray) -> str:
    digest = hashlib.blake2b(np.ascontiguousarray(prefix_ids, dtype="<i4").tobytes(), digest_size=16)
    digest.update(task.encode())
    return digest.hexdigest()
