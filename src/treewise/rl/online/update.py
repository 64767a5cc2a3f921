"""The optimizer steps of one iteration: each trains some of its trees, all together every tree once per epoch."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treewise.errors import DataError
from treewise.nn.gradients import clear_gradients
from treewise.trainer import TreeTrainingArguments
from treewise.trainer.data_loader import collate
from treewise.trainer.metrics import MetricMeans
from treewise.trainer.nonfinite import NonFiniteGuard
from treewise.trainer.step import StepRunner
from treewise.tree.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """metrics: means over the steps. tree_tokens, flat_tokens: of all steps. seconds: of all steps."""

    metrics: dict[str, float]
    tree_tokens: int
    flat_tokens: int
    seconds: float


class Updater:
    """Takes optimizer steps on the trees of an iteration.

    Parameters:
        args: gradient clipping, and whether trees are merged.
        guard: decides whether a gradient may be applied.
    """

    def __init__(
        self, runner: StepRunner, optimizer: Any, scheduler: Any, guard: NonFiniteGuard, args: TreeTrainingArguments
    ) -> None:
        self.runner, self.optimizer, self.scheduler = runner, optimizer, scheduler
        self.guard, self.args = guard, args

    def run(self, trees: Sequence[list[Trajectory]], batches: Sequence[Sequence[int]], step: int) -> UpdateReport:
        """One optimizer step for each batch of tree numbers. step: the number of the first one.

        Raises:
            DataError: a batch whose rows are not those that the engine trained.
            NonFiniteError: a loss or gradient that is not finite, as the arguments say.
        """
        started = time.perf_counter()
        means = MetricMeans()
        losses, norms = [], []
        tree_tokens = flat_tokens = 0
        for number, batch in enumerate(batches):
            outs, norm = self._step([trees[index] for index in batch], step + number)
            for out in outs:
                means.add(out)
                tree_tokens += out.num_tree_tokens
                flat_tokens += out.num_flat_tokens
            losses.append(math.fsum(out.loss for out in outs))
            norms.append(norm)
        metrics = {"loss": math.fsum(losses) / len(losses), "grad_norm": math.fsum(norms) / len(norms)}
        metrics |= means.take(lambda *values: list(values))
        return UpdateReport(metrics, tree_tokens, flat_tokens, time.perf_counter() - started)

    def _step(self, trees: Sequence[list[Trajectory]], step: int) -> tuple[list[Any], float]:
        objective = self.runner.objective
        merges = self.args.merge_across_trees and getattr(objective, "weighting", "once") != "once"
        forests = collate(trees, merges)
        _check_rows(trees, forests, step)
        self.guard.begin_step(forests)
        self.runner.model.train()
        clear_gradients(self.runner.model.parameters())
        out = self.runner.train_batch(forests, self.runner.denominator(forests, step), step)
        assert out is not None  # every row has a trained token
        self.guard.add_loss(out.loss)
        limit = self.args.max_grad_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.runner.model.parameters()), limit))
        is_finite = self.guard.is_finite(norm)
        named = [] if is_finite else self.runner.nonfinite_trajectories(forests)
        if self.guard.check_step(step, norm, is_finite=is_finite, nonfinite=named):
            self.optimizer.step()
            self.scheduler.step()
        clear_gradients(self.runner.model.parameters())
        return [out], norm


def _check_rows(trees: Sequence[list[Trajectory]], forests: Sequence[Any], step: int) -> None:
    """Raises `DataError` unless the forests hold each row once, with all of its trained tokens."""
    given = sum(row.num_trained_tokens for tree in trees for row in tree)
    held = sum(int((forest.flat_stream("loss_weights") > 0).sum()) for forest in forests)
    if given != held:
        raise DataError(f"step {step}: {given} trained tokens in the rows, {held} in the forests of the step.")
