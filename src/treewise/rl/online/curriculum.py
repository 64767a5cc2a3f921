"""What a curriculum of an online run does before the first iteration: angles of the items, and its self-check.

The self-check samples rollouts of a few items; half of them predict the other half.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError
from treewise.rl.curriculum import TaskSampler
from treewise.rl.curriculum.angles import Angles, angles_of
from treewise.rl.curriculum.gradient_norms import gradient_norms
from treewise.rl.curriculum.self_check import SIGNAL_OF, CheckReport, check_signals, is_refusable, refusal
from treewise.rl.online.draw_log import write_check
from treewise.rl.online.journal import journals
from treewise.rl.online.practice import FixedRollouts, NewTrees
from treewise.rl.online.sampling import GrowingTree, Rounds, grow_trees
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.success_book import SuccessBook
from treewise.rl.update import credited, scored, with_streams
from treewise.tree.trajectory import Trajectory

logger = logging.getLogger("treewise")

# Rows of one tree with everything that the objective needs; None where there are none.
Prepared = Callable[[list[Trajectory]], list[Trajectory] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumCheck:
    """The parts of a run that its curriculum is checked with.

    new_trees: trees of items. prompt_of: token ids of an item's prompt. reference: makes the engine of a KL term.
    rng: draws the items of the check.
    """

    items: TaskSampler
    settings: OnlineSettings
    engine: TreeEngine
    objective: Any
    reference: Callable[[], TreeEngine] | None
    new_trees: NewTrees
    prompt_of: Callable[[int], list[int]]
    rounds: Rounds
    rng: np.random.Generator

    def begin(self, folder: Path, *, is_writer: bool) -> tuple[CheckReport, list[GrowingTree]] | None:
        """Before the first iteration: the angles of all items, and the self-check of a curriculum that predicts.

        Parameters:
            is_writer: whether this process writes the report into the run's folder, and prints it.

        Raises:
            ConfigError: a signal that is useless here, of a curriculum that is then refused.
        """
        settings, curriculum = self.settings, self.items.curriculum
        if curriculum.kind.measures_angles:
            found = angles_of(self.engine, [self.prompt_of(index) for index in range(self.items.pool.size or 0)])
            self.items.begin(found.total.tolist(), found.num_shared)
        if curriculum.name not in SIGNAL_OF or not settings.check_items:
            return None
        report, trees = self.run(settings.check_items, settings.check_rollouts)
        if is_writer:
            write_check(folder, curriculum.name, report)
            sys.stdout.write(f"{report.text()}\n")
        reason = refusal(curriculum.name, report)
        if reason is not None and is_refusable(curriculum.name) and not curriculum.settings.force:
            for path in journals(folder) if is_writer else ():  # nothing to resume
                path.unlink()
            raise ConfigError(f"{reason} Choose another, or force it: curriculum_settings.force=true.")
        if reason is not None:
            logger.warning("%s", reason)
        return report, trees

    def run(self, num_items: int, num_rollouts: int) -> tuple[CheckReport, list[GrowingTree]]:
        """The self-check on a sample of the items, and the trees that it grew.

        Raises:
            DataError: fewer than 3 items have rewards.
        """
        size = self.items.pool.size
        chosen = np.arange(num_items) if size is None else self.rng.permutation(size)[:num_items]
        trees = self.new_trees(chosen.tolist(), 0, [0] * len(chosen))
        prepare = partial(
            prepared,
            settings=self.settings,
            objective=self.objective,
            engine=self.engine,
            reference=self.reference,
        )
        report = check_on_tasks(
            trees,
            num_rollouts,
            self.rounds,
            self.engine,
            self.objective,
            prepare,
            self.settings.success_at,
            self.items.memory.get("num_shared"),
        )
        return report, trees


def check_on_tasks(
    trees: Sequence[GrowingTree],
    num_rollouts: int,
    rounds: Rounds,
    engine: TreeEngine,
    objective: Any,
    prepare: Prepared,
    success_at: float,
    num_shared: int | None = None,
) -> CheckReport:
    """Samples rollouts of each tree's item and compares signals with what they claim to predict.

    Signals: angles of the prompts, and p (1 - p) of the posterior after the even rollouts. Targets, of the odd ones:
    the norm of their gradient, and the variance of their outcomes. Tasks without a reward in either half are left out.

    Parameters:
        trees: before their first round, one per item.
        prepare: credits the rows of a tree, and fills in the log-probs that the objective needs.
        num_shared: tokens of the prefix that all prompts of the pool share; None: that these share.

    Raises:
        DataError: fewer than 3 tasks are left.
    """
    branching: Any = FixedRollouts(num_rollouts)
    grow_trees(trees, replace(rounds, branching=branching))
    measured = [each for each in trees if len(each.tree.rewarded_leaves) >= 2]
    halves = [_halves(each) for each in measured]
    angles: Angles | None = None
    if measured:
        angles = angles_of(engine, [each.tree.prompt_ids for each in measured], num_shared)
    rows = [prepare(second) for _, second in halves]
    norms = iter(gradient_norms(engine, [own for own in rows if own is not None], objective))
    signals = {
        "angle": [] if angles is None else angles.total,
        "intra": [] if angles is None else angles.intra,
        "inter": [] if angles is None else angles.inter,
        "learnability": [_learnability(first, rounds.book, success_at) for first, _ in halves],
        "length": [len(each.tree.prompt_ids) for each in measured],
    }
    targets = {
        "gradient_norm": [0.0 if own is None else next(norms) for own in rows],
        "variance": [_variance(second, success_at) for _, second in halves],
    }
    return check_signals(
        {name: np.asarray(values, dtype=np.float64) for name, values in signals.items()},
        {name: np.asarray(values, dtype=np.float64) for name, values in targets.items()},
        num_rollouts=sum(len(each.tree.leaves) for each in trees),
        num_tokens=sum(each.num_sampled for each in trees),
        num_varied=sum(len({row.reward for half in both for row in half}) > 1 for both in halves),
    )


def prepared(
    rows: list[Trajectory],
    *,
    settings: OnlineSettings,
    objective: Any,
    engine: TreeEngine,
    reference: Callable[[], TreeEngine] | None,
) -> list[Trajectory] | None:
    """Rows of one tree with their advantages, and the log-probs that the objective needs."""
    if not rows:
        return None
    update = credited(
        [rows],
        objective,
        method=settings.advantages,
        settings=settings.advantages_settings,
        may_be_empty=True,
    )
    update = with_streams(update, objective, num_updates=1, old_logprobs="auto")
    return scored(update, engine, batch_size=1, reference=reference).trees[0]


def _halves(tree: GrowingTree) -> tuple[list[Trajectory], list[Trajectory]]:
    """The rewarded rollouts of even and of odd number."""
    rows = tree.tree.trajectories(source=f"self-check, {tree.tree.group}")
    return rows[::2], rows[1::2]


def _learnability(rows: Sequence[Trajectory], prior: SuccessBook, success_at: float) -> float:
    """p (1 - p) at the posterior mean after some rollouts of a task that was never tried."""
    book = SuccessBook(prior.settings)
    book.observe("task", sum((row.reward or 0.0) >= success_at for row in rows), len(rows))
    return book.learnability("task")


def _variance(rows: Sequence[Trajectory], success_at: float) -> float:
    """The unbiased variance of outcomes; 0 of a single one."""
    outcomes = [float((row.reward or 0.0) >= success_at) for row in rows]
    return float(np.var(outcomes, ddof=1)) if len(outcomes) > 1 else 0.0
