"""What a curriculum of an online run does before the first iteration: angles of the items, and its self-check.

The self-check samples rollouts of a few items; half of them predict the other half.
"""

import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError
from treewise.objectives import Objective
from treewise.rl.branching import Branch, RolloutTree
from treewise.rl.curriculum import TaskSampler
from treewise.rl.curriculum.recorded import check_on_trees
from treewise.rl.curriculum.self_check import SIGNAL_OF, CheckReport, is_refusable, refusal
from treewise.rl.curriculum.signals import angles_of
from treewise.rl.online.collecting import Collector
from treewise.rl.online.continuing import Rounds
from treewise.rl.online.growing import GrowingTree, grow_trees
from treewise.rl.online.journal import journals
from treewise.rl.online.records import write_check
from treewise.rl.update import credited, scored, with_streams
from treewise.tree.trajectory import Trajectory

logger = logging.getLogger("treewise")

_CHECK = 6  # names random streams, beside those of the loop and of curricula


@dataclass(frozen=True, slots=True)
class FixedRollouts:
    """A branching policy of one round: so many rollouts from the prompt, whatever they cost."""

    rollouts: int
    settings: Any = None

    def next_requests(self, tree: RolloutTree, *_: object) -> list[Branch]:
        return [] if len(tree) else [Branch(count=self.rollouts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumCheck:
    """The parts of a run that its curriculum is checked with. reference: of a KL term. seed: of the run."""

    items: TaskSampler
    rollouts: Collector
    rounds: Rounds
    engine: TreeEngine
    objective: Objective
    reference: TreeEngine | None
    seed: int

    def begin(self, folder: Path, *, is_writer: bool) -> int | None:
        """Before the first iteration: the angles of all items, and the self-check of a curriculum that predicts, whose
        trees the book observes. The tokens that it sampled; None without one.

        Parameters:
            is_writer: whether this process writes the report into the run's folder, and prints it.

        Raises:
            ConfigError: a signal that is useless here, of a curriculum that is then refused.
        """
        settings, curriculum = self.rollouts.settings, self.items.curriculum
        if curriculum.measures_angles:
            found = angles_of(self.engine, list(map(self.rollouts.prompt_of, range(self.items.size or 0))))
            self.items.begin(found.total.tolist(), found.num_shared)
        if curriculum.name not in SIGNAL_OF or not settings.check_items:
            return None
        report, trees = self._run(settings.check_items, settings.check_rollouts)
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
        for each in trees:
            self.rounds.book.observe_tree(each.key, each.tree)
        return report.num_tokens

    def run(self, num_items: int, num_rollouts: int) -> CheckReport:
        """Samples rollouts of some items and compares signals with what they claim to predict (`check_on_trees`). Items
        without a reward in either half are left out.

        Raises:
            DataError: fewer than 3 items have rewards.
        """
        return self._run(num_items, num_rollouts)[0]

    def _run(self, num_items: int, num_rollouts: int) -> tuple[CheckReport, list[GrowingTree]]:
        size, success_at = self.items.size, self.rollouts.settings.success_at
        rng = np.random.default_rng([self.seed, _CHECK])
        chosen = np.arange(num_items) if size is None else rng.permutation(size)[:num_items]
        trees = self.rollouts.new_trees((self.seed, 0, _CHECK), chosen.tolist(), 0, [0] * len(chosen))
        branching: Any = FixedRollouts(num_rollouts)
        grow_trees(trees, replace(self.rounds, branching=branching))
        rows = [each.tree.trajectories(source=f"self-check, {each.tree.group}") for each in trees]
        report = check_on_trees(
            [own for own in rows if len(own) >= 2],
            self.engine,
            self.objective,
            self._credited,
            success_at,
            num_shared=self.items.memory.get("num_shared"),
            book_settings=self.rounds.book.settings,
        )
        num_rollouts, num_tokens = sum(len(each.tree.leaves) for each in trees), sum(each.num_sampled for each in trees)
        report = replace(report, num_rollouts=num_rollouts, num_tokens=num_tokens)
        return report, trees

    def _credited(self, rows: list[Trajectory]) -> list[Trajectory]:
        """Rows of one tree with their advantages, and the log-probs that the objective needs."""
        settings = self.rollouts.settings
        update = credited(
            [rows],
            self.objective,
            method=settings.advantages,
            settings=settings.advantages_settings,
            may_be_empty=True,
        )
        update = with_streams(update, self.objective, num_updates=1, old_logprobs="auto")
        return scored(update, self.engine, batch_size=1, reference=self.reference).trees[0]
