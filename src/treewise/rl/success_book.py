"""How likely tasks, and the branch points of their rollout trees, are to end in success: Beta posteriors with decay.

One book serves the branching rule `lcr` (its v), the choice of tasks (learnability, `p (1 - p)`), and a calibration
curve of its own predictions. It is saved with every checkpoint as plain JSON.

Each key holds pseudo-counts (a, b) of successes and failures. An observation of s successes in n trials makes
`a <- decay a + (1 - decay) a0 + s`, b alike with `n - s` (MoPPS, arXiv 2507.04632, section 4): old outcomes are those
of older policies, and count less. The prior (a0, b0) of a task is the book's; of a branch point it is `node_strength`
trials at the task's own mean.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treewise.errors import ConfigError, DataError
from treewise.rl.branching.protocol import Kind, Signals, points_of
from treewise.rl.branching.rollout_tree import RolloutTree
from treewise.rl.node_values import node_values

FORMAT = 1
NUM_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BookSettings:
    """decay: factor on earlier counts at each observation; 1 keeps them. prior_successes, prior_failures: pseudo-counts
    of a task never tried. node_strength: trials that the task's mean is worth as the prior of a branch point.
    success_at: rewards from here on are successes. max_nodes: branch points kept; the longest unobserved go first.
    """

    decay: float = 0.95
    prior_successes: float = 1.0
    prior_failures: float = 1.0
    node_strength: float = 4.0
    success_at: float = 0.5
    max_nodes: int = 100_000

    def __post_init__(self) -> None:
        for name in ("prior_successes", "prior_failures", "node_strength"):
            value = getattr(self, name)
            if not 0 < value < np.inf:
                raise ConfigError(f"{name}={value} must be positive and finite.")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay={self.decay} must lie in 0..1, above 0.")
        if not np.isfinite(self.success_at):
            raise ConfigError(f"success_at={self.success_at} must be finite.")
        if self.max_nodes < 0:
            raise ConfigError(f"max_nodes={self.max_nodes} must not be negative.")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predictions of tasks that had been tried before, against what came.

    predicted, observed: [10] float64, means of the trials whose prediction lay in each tenth of 0..1; NaN without any.
    trials: [10] float64. brier: mean squared error of the predictions against outcomes of 0 or 1, NaN without trials;
    always predicting the overall rate p gives p (1 - p). first: trials of tasks that had not been tried, left out.
    """

    predicted: np.ndarray
    observed: np.ndarray
    trials: np.ndarray
    brier: float
    first: float


class SuccessBook:
    """Posteriors by task and by branch point.

    Parameters:
        settings: see `BookSettings`.
    """

    def __init__(self, settings: BookSettings | None = None) -> None:
        self.settings = settings or BookSettings()
        self._tasks: dict[str, tuple[float, float]] = {}
        self._nodes: dict[str, tuple[float, float]] = {}  # in the order of their last observation
        self._bins = np.zeros((3, NUM_BINS))  # trials, sums of predictions, successes
        self._squared = 0.0
        self._first = 0.0

    # -- predictions --------------------------------------------------------------------------------------------------

    def counts(self, task: str) -> tuple[float, float]:
        """Pseudo-counts (a, b) of a task's Beta posterior."""
        return self._tasks.get(task, (self.settings.prior_successes, self.settings.prior_failures))

    def success(self, task: str) -> float:
        """The posterior mean, in 0..1."""
        a, b = self.counts(task)
        return a / (a + b)

    def learnability(self, task: str) -> float:
        """`p (1 - p)` at the posterior mean: the variance of an outcome, 0.25 at most."""
        return self.success(task) * (1 - self.success(task))

    def node_success(self, task: str, prefix_ids: np.ndarray) -> float:
        """The posterior mean at a branch point, given by all token ids before it; the task's where it is not known."""
        counts = self._nodes.get(_node_key(task, prefix_ids))
        return self.success(task) if counts is None else counts[0] / sum(counts)

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
        """Adds the outcomes of independent rollouts of a task.

        Raises:
            DataError: numbers that are not finite, or successes outside of 0..trials; nothing is added then.
        """
        _check_counts(task, successes, trials)
        if not trials:
            return
        predicted = self.success(task)
        if task in self._tasks:
            index = min(int(predicted * NUM_BINS), NUM_BINS - 1)
            self._bins[:, index] += (trials, predicted * trials, successes)
            self._squared += successes * (1 - predicted) ** 2 + (trials - successes) * predicted**2
        else:
            self._first += trials
        prior = (self.settings.prior_successes, self.settings.prior_failures)
        self._tasks[task] = self._decayed(self.counts(task), prior, successes, trials)

    def observe_node(self, task: str, prefix_ids: np.ndarray, successes: float, trials: float) -> None:
        """Adds the outcomes of independent rollouts from a branch point.

        Raises:
            DataError: as of `observe`.
        """
        _check_counts(task, successes, trials)
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

    def calibration(self) -> Calibration:
        """Predictions against outcomes so far."""
        trials, predicted, observed = self._bins
        empty = np.full(NUM_BINS, np.nan)
        total = float(trials.sum())
        return Calibration(
            predicted=np.divide(predicted, trials, out=empty.copy(), where=trials > 0),
            observed=np.divide(observed, trials, out=empty.copy(), where=trials > 0),
            trials=trials.copy(),
            brier=self._squared / total if total else float("nan"),
            first=self._first,
        )

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
            "bins": self._bins.tolist(),
            "squared": self._squared,
            "first": self._first,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "SuccessBook":
        """A book as `state_dict` wrote it.

        Raises:
            DataError: another format, a missing entry, or a number that is not finite and positive where it must be.
        """
        if state.get("format") != FORMAT:
            raise DataError(f"a success book of format {state.get('format')!r}; this version reads {FORMAT}.")
        try:
            book = cls(BookSettings(**state["settings"]))
            book._tasks = {key: (float(a), float(b)) for key, (a, b) in state["tasks"].items()}
            book._nodes = {key: (float(a), float(b)) for key, a, b in state["nodes"]}
            book._bins = np.array(state["bins"], dtype=np.float64).reshape(3, NUM_BINS)
            book._squared, book._first = float(state["squared"]), float(state["first"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not the state of a success book: {type(error).__name__}: {error}.") from None
        for key, counts in (*book._tasks.items(), *book._nodes.items()):
            if not all(0 < count < np.inf for count in counts):
                raise DataError(f"success book, {key!r}: counts {counts}; they must be positive and finite.")
        if not np.isfinite([*book._bins.flat, book._squared, book._first]).all():
            raise DataError("success book: its calibration is not finite.")
        return book


def _check_counts(task: str, successes: float, trials: float) -> None:
    if not 0 <= trials < np.inf or not 0 <= successes <= trials:
        raise DataError(f"task {task!r}: {successes} successes in {trials} trials; give finite numbers, 0..trials.")


def _node_key(task: str, prefix_ids: np.ndarray) -> str:
    digest = hashlib.blake2b(np.ascontiguousarray(prefix_ids, dtype="<i4").tobytes(), digest_size=16)
    digest.update(task.encode())
    return digest.hexdigest()
