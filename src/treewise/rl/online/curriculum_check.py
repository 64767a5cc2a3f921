"""The self-check of a curriculum on tasks: rollouts of a few items, half of them to predict the other half."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treewise.engine.engine import TreeEngine
from treewise.rl.curriculum.angles import Angles, angles_of
from treewise.rl.curriculum.gradient_norms import gradient_norms
from treewise.rl.curriculum.self_check import CheckReport, check_signals
from treewise.rl.online.practice import FixedRollouts
from treewise.rl.online.sampling import GrowingTree, Rounds, grow_trees
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.success_book import SuccessBook
from treewise.rl.update import credited, scored, with_streams
from treewise.tree.trajectory import Trajectory

# Rows of one tree with everything that the objective needs; None where there are none.
Prepared = Callable[[list[Trajectory]], list[Trajectory] | None]


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
    name: str,
    engine: TreeEngine,
    reference: Callable[[], TreeEngine] | None,
) -> list[Trajectory] | None:
    """Rows of one tree with their advantages, and the log-probs that the objective needs."""
    if not rows:
        return None
    update = credited(
        [rows],
        objective,
        name=name,
        method=settings.advantages,
        settings=settings.advantages_settings,
        tree_of=list(range(len(rows))),
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
