"""The optimizer steps of one iteration: each trains some of its trees, all together every tree once per epoch.

Of several processes each trains its part of a step, placed by predicted time as in training on recorded data, and
gradients are added up; all take the same step.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treewise.distributed import ranks
from treewise.distributed.online_placement import OnlinePlacer, image_tokens_of, prior_of
from treewise.errors import DataError
from treewise.nn.flops import flop_model
from treewise.nn.gradients import clear_gradients
from treewise.trainer import TreeTrainingArguments
from treewise.trainer.data_loader import collate
from treewise.trainer.metrics import MetricMeans
from treewise.trainer.nonfinite import NonFiniteGuard
from treewise.trainer.step import StepRunner
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """num_steps: of the optimizer. metrics: means over them. tree_tokens, flat_tokens, seconds: of all steps."""

    num_steps: int
    metrics: dict[str, float]
    tree_tokens: int
    flat_tokens: int
    seconds: float


class Updater:
    """Takes optimizer steps on the trees of an iteration.

    Parameters:
        args: gradient clipping, and whether trees are merged.
        guard: decides whether a gradient may be applied.

    Attributes:
        num_begun: optimizer steps that were begun; parameters may have changed with the first.
    """

    def __init__(
        self, runner: StepRunner, optimizer: Any, scheduler: Any, guard: NonFiniteGuard, args: TreeTrainingArguments
    ) -> None:
        self.runner, self.optimizer, self.scheduler = runner, optimizer, scheduler
        self.guard, self.args = guard, args
        self.num_begun = 0
        self._placer = None
        if args.places_trees:
            budget = args.max_tokens if isinstance(args.max_tokens, int) else None
            weighting = getattr(runner.objective, "weighting", "per_trajectory")
            flops = flop_model(runner.model)
            self._placer = OnlinePlacer(
                prior_of(flops), budget, weighting, fits=False, image_tokens=image_tokens_of(flops)
            )

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
        loss, trees_of_all, flat_of_all = self._sum(math.fsum(losses), tree_tokens, flat_tokens)
        metrics = {"loss": loss / len(losses), "grad_norm": math.fsum(norms) / len(norms)}
        metrics |= means.take(self._sum)
        return UpdateReport(len(losses), metrics, int(trees_of_all), int(flat_of_all), time.perf_counter() - started)

    def _sum(self, *values: float) -> list[float]:
        return ranks.sum_over(self.args.device, *values)

    def _own_part(self, forests: list[Forest], step: int) -> list[Forest]:
        if self._placer is not None:
            return self._placer.own_part(step, forests)
        return forests[ranks.own() :: ranks.count()]

    def _step(self, trees: Sequence[list[Trajectory]], step: int) -> tuple[list[Any], float]:
        objective = self.runner.objective
        merges = self.args.merge_across_trees and getattr(objective, "weighting", "once") != "once"
        forests = collate(trees, merges)
        _check_rows(trees, forests, step)
        forests = self._own_part(forests, step)
        self.guard.begin_step(forests)
        self.runner.model.train()
        clear_gradients(self.runner.model.parameters())
        batch = self.runner.prepare(forests)
        denominator = self.runner.denominator([batch], step)
        self.runner.count_experts([batch], step)
        out = self.runner.train_batch(batch, denominator, step)
        self.runner.sum_gradients()
        self.guard.add_loss(0.0 if out is None else out.loss)
        limit = self.args.max_grad_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.runner.model.parameters()), limit))
        (num_nonfinite,) = self._sum(float(not self.guard.is_finite(norm)))
        is_finite = not num_nonfinite
        named = [] if is_finite else self.runner.nonfinite_trajectories(forests)
        if self.guard.check_step(step, norm, is_finite=is_finite, nonfinite=named):
            self.num_begun += 1
            self.optimizer.step()
            self.scheduler.step()
        clear_gradients(self.runner.model.parameters())
        return [] if out is None else [out], norm


def _check_rows(trees: Sequence[list[Trajectory]], forests: Sequence[Any], step: int) -> None:
    """Raises `DataError` unless the forests hold each row once, with all of its trained tokens."""
    given = sum(row.num_trained_tokens for tree in trees for row in tree)
    held = sum(int((forest.flat_stream("loss_weights") > 0).sum()) for forest in forests)
    if given != held:
        raise DataError(f"step {step}: {given} trained tokens in the rows, {held} in the forests of the step.")
