"""Recorded trees: what they say about their tasks, the self-check on them, and the order in which they are trained.

Every tree is trained exactly once an epoch. `learnability` draws them one after another in proportion to p (1 - p) of
their rewards. `gain` sorts them by angle concentration, the highest first, with noise: a tree of rank r is trained at
place r + width z, z of a standard normal distribution, which is a Gaussian over ranks whose mean moves on by one at
each tree. (In a run that samples, the mean moves with accuracy; recorded rollouts have none of the present model.)
`gain_shuffled` is `gain` over shuffled ranks.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from treewise.distributed import ranks as processes
from treewise.engine.engine import TreeEngine
from treewise.errors import CheckpointError, ConfigError, DataError
from treewise.objectives import Objective
from treewise.rl.curriculum.self_check import SIGNAL_OF, CheckReport, check_signals, require_tasks
from treewise.rl.curriculum.signals import angles_of, gradient_norms
from treewise.rl.curriculum.task_sampler import Curriculum, ranks_by_angle, shuffled_ranks
from treewise.rl.success_book import BookSettings, SuccessBook
from treewise.tree.trajectory import Trajectory, number_rollouts

Tree = Sequence[Trajectory]
# The rows of one tree with everything that the objective needs.
Prepared = Callable[[list[Trajectory]], list[Trajectory]]
ORDERS = ("learnability", "gain", "gain_shuffled")  # curricula that can order recorded trees
_ORDER = 7  # names the random stream


def prompt_of(tree: Tree) -> np.ndarray:
    """[n] int32, the tokens that come before anything is trained, or the first token where that is trained."""
    starts = [int(np.argmax(row.loss_weights > 0)) if row.num_trained_tokens else len(row) for row in tree]
    first = int(np.argmin(starts))
    ids: np.ndarray = tree[first].token_ids[: max(starts[first], 1)]
    return ids


def outcomes_of(tree: Tree, success_at: float) -> list[bool]:
    """Whether each rollout with a reward is a success."""
    numbers = number_rollouts(list(tree)).tolist()
    known = {number: row.reward for number, row in zip(numbers, tree, strict=True) if row.reward is not None}
    return [reward >= success_at for reward in known.values()]


def learnabilities(trees: Sequence[Tree], success_at: float, settings: BookSettings | None = None) -> np.ndarray:
    """[trees] float64, p (1 - p) at the posterior mean of each tree's outcomes, from a book's prior.

    Raises:
        DataError: a tree without a reward; named.
    """
    book = SuccessBook(settings)
    for number, tree in enumerate(trees):
        outcomes = outcomes_of(tree, success_at)
        if not outcomes:
            raise DataError(f"{tree[0].source or f'tree {number}'}: no reward, so its learnability is not known.")
        book.observe(str(number), sum(outcomes), len(outcomes))
    rates = np.array([book.success(str(number)) for number in range(len(trees))])
    return np.asarray(rates * (1 - rates))


def check_on_trees(
    trees: Sequence[Tree],
    engine: TreeEngine,
    objective: Objective | None,
    prepared: Prepared,
    success_at: float = 0.5,
    *,
    num_shared: int | None = None,
    book_settings: BookSettings | None = None,
) -> CheckReport:
    """Compares signals of trees with what they claim to predict.

    Signals: angles of the prompts, their lengths, and p (1 - p) of the posterior after what is known. Targets, of what
    comes: the norm of its gradient, and the variance of its outcomes. Where all trees have several rollouts with
    rewards, those of even number are what is known, and those of odd number what comes; otherwise the only target is
    the gradient's norm over the whole tree, and the only signals are those of the prompt.

    Parameters:
        prepared: credits the rows of a tree, and fills in the log-probs that the objective needs.
        num_shared: tokens of the prefix that all prompts of the pool share; None: that these share.

    Raises:
        DataError: fewer than 3 trees.
    """
    require_tasks(len(trees))
    has_outcomes = all(len(outcomes_of(tree, success_at)) >= 2 for tree in trees)
    halves = [_halves(tree) if has_outcomes else (list(tree), list(tree)) for tree in trees]
    prompts = [prompt_of(tree) for tree in trees]
    angles = angles_of(engine, prompts, num_shared)
    signals = {"angle": angles.total, "intra": angles.intra, "inter": angles.inter}
    targets = {"gradient_norm": np.array(gradient_norms(engine, [prepared(own) for _, own in halves], objective))}
    if has_outcomes:
        signals["learnability"] = learnabilities([first for first, _ in halves], success_at, book_settings)
        to_come = [outcomes_of(second, success_at) for _, second in halves]
        targets["variance"] = np.array([np.var(each, ddof=1) if len(each) > 1 else 0.0 for each in to_come])
    signals["length"] = np.array([float(len(prompt)) for prompt in prompts])
    return check_signals(
        signals,
        targets,
        num_rollouts=sum(len(set(number_rollouts(list(tree)).tolist())) for tree in trees),
        num_tokens=0,
        num_varied=sum(len({row.reward for row in tree}) > 1 for tree in trees),
    )


def _halves(tree: Tree) -> tuple[list[Trajectory], list[Trajectory]]:
    """The rows of rollouts of even and of odd number, among those with a reward."""
    numbers = number_rollouts(list(tree)).tolist()
    rewarded = list(dict.fromkeys(n for n, row in zip(numbers, tree, strict=True) if row.reward is not None))
    order = {number: index for index, number in enumerate(rewarded)}
    rows = [(order[number], row) for number, row in zip(numbers, tree, strict=True) if number in order]
    return [row for index, row in rows if index % 2 == 0], [row for index, row in rows if index % 2]


class RecordedOrder:
    """The order of one run's trees (`treewise.trainer.data_loader.TreeOrder`).

    Parameters:
        num_trees: of the data.
        measure: gives the curriculum's signal (`SIGNAL_OF`) of each tree, [trees], with the model before its first
            step. Called at most once, on the first process; not where the curriculum has none.

    Raises:
        ConfigError: a curriculum that chooses what to sample, and so orders nothing.
    """

    def __init__(self, curriculum: Curriculum, num_trees: int, seed: int, measure: Callable[[], np.ndarray]) -> None:
        check_orders(curriculum.name)
        if getattr(curriculum.settings, "thompson", False):
            raise ConfigError("thompson draws what to sample next; recorded trees are ordered by their means alone.")
        self.curriculum, self.num_trees, self.seed = curriculum, num_trees, seed
        self._measure, self._signal = measure, SIGNAL_OF.get(curriculum.name)
        self._scores: np.ndarray | None = None

    @property
    def description(self) -> str:
        """Name and settings."""
        return repr(self.curriculum)

    def begin(self) -> None:
        """Measures what the order depends on, unless it was restored."""
        if self._scores is None and self._signal is not None:
            self._take(processes.on_first_rank(self._measure))

    def order(self, epoch: int) -> np.ndarray:
        """[trees] int64, all trees in the order of an epoch."""
        rng = np.random.default_rng([self.seed, epoch, _ORDER])
        if self._signal is None:
            ranks = shuffled_ranks(self.num_trees, self.seed)
        else:
            assert self._scores is not None
            if self._signal == "learnability":
                return np.argsort(waiting_times(self._scores, rng), kind="stable")
            ranks = ranks_by_angle(self._scores.tolist())
        places = ranks + self.curriculum.settings.width * self.num_trees * rng.standard_normal(self.num_trees)
        return np.argsort(places, kind="stable")

    def state(self) -> dict[str, list[float]]:
        """What was measured."""
        return {} if self._signal is None or self._scores is None else {self._signal: self._scores.tolist()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Takes over what was measured before the first step.

        Raises:
            CheckpointError: a score is missing, or there are not as many as trees.
        """
        try:
            if self._signal is not None:
                self._take(np.array(state[self._signal]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not the state of a curriculum: {type(error).__name__}: {error}.") from None

    def _take(self, values: np.ndarray) -> None:
        if values.shape != (self.num_trees,):
            raise CheckpointError(
                f"the curriculum has {values.size} values of {self._signal} for {self.num_trees} trees."
            )
        self._scores = np.asarray(values, dtype=np.float64)


def waiting_times(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[trees] float64; sorted, they are a draw one after another in proportion to weights (exponential clocks)."""
    clocks = rng.exponential(size=len(weights))
    return np.divide(clocks, weights, out=np.full(len(weights), np.inf), where=weights > 0)


def check_orders(name: str) -> None:
    """Raises `ConfigError` where a curriculum cannot order recorded trees."""
    if name not in ORDERS:
        raise ConfigError(
            f"curriculum {name!r} chooses what to sample next, and recorded trees are all trained once an epoch; "
            f"choose uniform, {', '.join(ORDERS)}."
        )
