"""What a curriculum of an online run does before the first iteration: angles of the items, and its self-check.

The self-check samples rollouts of a few items; half of them predict the other half.
"""

import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treewise.errors import ConfigError
from treewise.rl.branching import branching_named
from treewise.rl.curriculum.self_check import SIGNAL_OF, CheckReport, check_signals, refusal, require_tasks
from treewise.rl.curriculum.signals import angles_of, gradient_norms
from treewise.rl.online.growing import GrowingTree, grow_trees
from treewise.rl.online.journal import journals
from treewise.rl.online.records import write_check
from treewise.rl.success_book import SuccessBook
from treewise.rl.update import own_update
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from treewise.rl.online.trainer import OnlineTrainer

logger = logging.getLogger("treewise")

_CHECK = 6  # names random streams, beside those of the loop and of curricula


def begin_curriculum(trainer: "OnlineTrainer") -> int | None:
    """Before the first iteration: the angles of all items, and the self-check of a curriculum that predicts, whose
    trees the book observes. The tokens that it sampled; None without one. The first process writes the report into the
    run's folder, and prints it.

    Raises:
        ConfigError: a signal that is useless here, of a curriculum that is then refused.
    """
    settings, items, curriculum = trainer.settings, trainer.items, trainer.items.curriculum
    if curriculum.measures_angles:
        found = angles_of(trainer.engine, list(map(trainer.rollouts.prompt_of, range(items.size or 0))))
        items.begin(found.total.tolist(), found.num_shared)
    if curriculum.name not in SIGNAL_OF or not settings.check_items:
        return None
    report, trees = check_items(trainer, settings.check_items, settings.check_rollouts)
    if trainer.args.should_save:
        write_check(trainer.folder, curriculum.name, report)
        sys.stdout.write(f"{report.text()}\n")
    reason = refusal(curriculum.name, report)
    if reason is not None and curriculum.measures_angles and not curriculum.settings.force:
        for path in journals(trainer.folder) if trainer.args.should_save else ():  # nothing to resume
            path.unlink()
        raise ConfigError(f"{reason} Choose another, or force it: curriculum_settings.force=true.")
    if reason is not None:
        logger.warning("%s", reason)
    for each in trees:
        trainer.loop.book.observe_tree(each.key, each.tree)
    return report.num_tokens


def check_items(trainer: "OnlineTrainer", num_items: int, num_rollouts: int) -> tuple[CheckReport, list[GrowingTree]]:
    """Samples rollouts of some items and compares signals with what they claim to predict. Items with fewer than two
    rewards are left out.

    Signals: angles of the prompts, their lengths, and p (1 - p) of the posterior after the rollouts of even number.
    Targets, of those of odd number: the norm of their gradient, and the variance of their outcomes.

    Raises:
        DataError: fewer than 3 items have rewards.
    """
    items, settings, objective, seed = trainer.items, trainer.settings, trainer.loss_objective, trainer.args.seed
    rng = np.random.default_rng([seed, _CHECK])
    chosen = np.arange(num_items) if items.size is None else rng.permutation(items.size)[:num_items]
    trees = trainer.rollouts.new_trees((seed, 0, _CHECK), chosen.tolist(), 0, [1] * len(chosen))
    rounds = trainer.rollouts.rounds(trainer.loop, trainer.journal(0))
    # A budget of one token and lengths that are not known: one round of all rollouts, whatever they cost.
    grow_trees(trees, replace(rounds, branching=branching_named("none", roots=num_rollouts), expected_tokens=None))
    known = [(each.tree, each.tree.trajectories(source=f"self-check, {each.tree.group}")) for each in trees]
    known = [(tree, rows) for tree, rows in known if len(rows) >= 2]
    require_tasks(len(known))

    def credited(rows: list[Trajectory]) -> list[Trajectory]:
        """With advantages, and the log-probs that the objective needs."""
        method, more = settings.advantages, settings.advantages_settings
        reference = trainer.reference_engine
        return own_update([rows], objective, trainer.engine, reference=reference, method=method, settings=more).trees[0]

    book, rates, variances = SuccessBook(trainer.loop.book.settings), [], []
    for number, (_, rows) in enumerate(known):
        outcomes = [float(row.reward or 0.0) >= settings.success_at for row in rows]
        book.observe(str(number), sum(outcomes[::2]), len(outcomes[::2]))
        rates.append(book.success(str(number)))
        to_come = outcomes[1::2]
        variances.append(np.var(to_come, ddof=1) if len(to_come) > 1 else 0.0)
    prompts = [tree.prompt_ids for tree, _ in known]
    angles = angles_of(trainer.engine, prompts, items.memory.get("num_shared"))
    halves = [credited(rows[1::2]) for _, rows in known]
    report = check_signals(
        {
            **{"angle": angles.total, "intra": angles.intra, "inter": angles.inter},
            "learnability": np.array(rates) * (1 - np.array(rates)),
            "length": np.array([float(len(prompt)) for prompt in prompts]),
        },
        {
            "gradient_norm": np.array(gradient_norms(trainer.engine, halves, objective)),
            "variance": np.array(variances),
        },
        num_rollouts=sum(len(each.tree.leaves) for each in trees),
        num_tokens=sum(each.num_sampled for each in trees),
        num_varied=sum(len({row.reward for row in rows}) > 1 for _, rows in known),
    )
    return report, trees
