"""What a curriculum of an online run does before the first iteration: angles of the items, and its self-check, which
samples rollouts of a few of them.
"""

import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treewise.errors import ConfigError
from treewise.rl.branching import branching_named
from treewise.rl.curriculum.self_check import CheckReport, check_angles
from treewise.rl.curriculum.signals import angles_of
from treewise.rl.online.growing import GrowingTree, grow_trees
from treewise.rl.online.journal import journals
from treewise.rl.online.records import write_check
from treewise.rl.update import own_update
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from treewise.rl.online.trainer import OnlineTrainer

logger = logging.getLogger("treewise")

_CHECK = 6  # names random streams, beside those of the loop and of curricula


def begin_curriculum(trainer: "OnlineTrainer") -> int | None:
    """Before the first iteration: the angles of all items, and the self-check of them, whose trees the book observes.
    The tokens that it sampled; None without one. The first process writes the report into the run's folder, and prints
    it.

    Raises:
        ConfigError: angles are useless here.
    """
    settings, items, curriculum = trainer.settings, trainer.items, trainer.items.curriculum
    if not curriculum.measures_angles:
        return None
    found = angles_of(trainer.engine, list(map(trainer.rollouts.prompt_of, range(items.size or 0))))
    items.begin(found.total.tolist(), found.num_shared)
    if not settings.check_items:
        return None
    report, trees = check_items(trainer, settings.check_items, settings.check_rollouts)
    if trainer.args.should_save:
        write_check(trainer.folder, curriculum.name, report)
        sys.stdout.write(f"{report.text()}\n")
    reason = report.refusal()
    if reason is not None and not curriculum.settings.force:
        for path in journals(trainer.folder) if trainer.args.should_save else ():  # nothing to resume
            path.unlink()
        raise ConfigError(f"{reason} Choose another, or force it: curriculum_settings.force=true.")
    if reason is not None:
        logger.warning("%s", reason)
    for each in trees:
        trainer.loop.book.observe_tree(each.key, each.tree)
    return report.num_tokens


def check_items(trainer: "OnlineTrainer", num_items: int, num_rollouts: int) -> tuple[CheckReport, list[GrowingTree]]:
    """Samples rollouts of some items and compares their angles with the norms of their gradients.

    Raises:
        DataError: fewer than 3 items have two rewards.
    """
    items, settings, objective, seed = trainer.items, trainer.settings, trainer.loss_objective, trainer.args.seed
    rng = np.random.default_rng([seed, _CHECK])
    chosen = np.arange(num_items) if items.size is None else rng.permutation(items.size)[:num_items]
    trees = trainer.rollouts.new_trees((seed, 0, _CHECK), chosen.tolist(), 0, [1] * len(chosen))
    rounds = trainer.rollouts.rounds(trainer.loop, trainer.journal(0))
    # A budget of one token and lengths that are not known: one round of all rollouts, whatever they cost.
    grow_trees(trees, replace(rounds, branching=branching_named("none", roots=num_rollouts), expected_tokens=None))

    def credited(rows: list[Trajectory]) -> list[Trajectory]:
        method, more = settings.advantages, settings.advantages_settings
        reference = trainer.reference_engine
        return own_update([rows], objective, trainer.engine, reference=reference, method=method, settings=more).trees[0]

    report = check_angles(
        [each.tree.trajectories(source=f"self-check, {each.tree.group}") for each in trees],
        [each.tree.prompt_ids.tolist() for each in trees],
        trainer.engine,
        objective,
        credited,
        num_tokens=sum(each.num_sampled for each in trees),
        num_shared=items.memory.get("num_shared"),
    )
    return report, trees
