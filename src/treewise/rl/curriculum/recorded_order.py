"""The order in which recorded trees are trained: every tree exactly once an epoch.

`learnability` draws them one after another in proportion to p (1 - p) of their rewards. `gain` sorts them by angle
concentration, the highest first, with noise: a tree of rank r is trained at place r + width z, z of a standard normal
distribution, which is a Gaussian over ranks whose mean moves on by one at each tree. (In a run that samples, the mean
moves with accuracy; recorded rollouts have none of the present model.) `gain_shuffled` is `gain` over shuffled ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from treewise.distributed import ranks as processes
from treewise.errors import CheckpointError, ConfigError
from treewise.rl.curriculum.gain import ranks_by_angle, shuffled_ranks
from treewise.rl.curriculum.registry import Curriculum

# What each curriculum that can order recorded trees needs of them.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "learnability": ("learnability",),
    "gain": ("angle",),
    "gain_shuffled": (),
}
Measure = Callable[[], Mapping[str, np.ndarray]]
_ORDER = 7  # names the random stream


class RecordedOrder:
    """The order of one run's trees (`treewise.trainer.data_loader.TreeOrder`).

    Parameters:
        num_trees: of the data.
        measure: gives what `NEEDS` names, [trees] each, with the model before its first step. Called at most once, on
            the first process.

    Raises:
        ConfigError: a curriculum that chooses what to sample, and so orders nothing.
    """

    def __init__(self, curriculum: Curriculum, num_trees: int, seed: int, measure: Measure) -> None:
        check_orders(curriculum.name)
        if getattr(curriculum.settings, "thompson", False):
            raise ConfigError("thompson draws what to sample next; recorded trees are ordered by their means alone.")
        self.curriculum, self.num_trees, self.seed = curriculum, num_trees, seed
        self._measure = measure
        self._scores: dict[str, np.ndarray] | None = None

    @property
    def description(self) -> str:
        """Name and settings."""
        return repr(self.curriculum)

    def begin(self) -> None:
        """Measures what the order depends on, unless it was restored."""
        if self._scores is None:
            measured = processes.on_first_rank(lambda: dict(self._measure()))
            self._take({name: np.asarray(values, dtype=np.float64) for name, values in measured.items()})

    def order(self, epoch: int) -> np.ndarray:
        """[trees] int64, all trees in the order of an epoch."""
        assert self._scores is not None
        rng = np.random.default_rng([self.seed, epoch, _ORDER])
        name, scores = self.curriculum.name, self._scores
        if name == "learnability":
            return np.argsort(waiting_times(scores["learnability"], rng), kind="stable")
        is_shuffled = name == "gain_shuffled"
        ranks = shuffled_ranks(self.num_trees, self.seed) if is_shuffled else ranks_by_angle(scores["angle"].tolist())
        places = ranks + self.curriculum.settings.width * self.num_trees * rng.standard_normal(self.num_trees)
        return np.argsort(places, kind="stable")

    def state(self) -> dict[str, Any]:
        """What was measured."""
        return {name: values.tolist() for name, values in (self._scores or {}).items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what was measured before the first step.

        Raises:
            CheckpointError: a score is missing, or there are not as many as trees.
        """
        try:
            self._take({name: np.array(state[name], dtype=np.float64) for name in NEEDS[self.curriculum.name]})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not the state of a curriculum: {type(error).__name__}: {error}.") from None

    def _take(self, scores: dict[str, np.ndarray]) -> None:
        for name, values in scores.items():
            if values.shape != (self.num_trees,):
                raise CheckpointError(f"the curriculum has {values.size} values of {name} for {self.num_trees} trees.")
            ranks_by_angle(values.tolist())  # raises for values that are not finite
        self._scores = scores


def waiting_times(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[trees] float64; sorted, they are a draw one after another in proportion to weights (exponential clocks)."""
    clocks = rng.exponential(size=len(weights))
    return np.divide(clocks, weights, out=np.full(len(weights), np.inf), where=weights > 0)


def check_orders(name: str) -> None:
    """Raises `ConfigError` where a curriculum cannot order recorded trees."""
    if name not in NEEDS:
        raise ConfigError(
            f"curriculum {name!r} chooses what to sample next, and recorded trees are all trained once an epoch; "
            f"choose uniform, {', '.join(NEEDS)}."
        )
