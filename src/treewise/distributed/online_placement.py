"""Placement in a training run: which rank trains which trajectories of each step.

Every rank sees all trees of a batch, computes the same placement (`treewise.distributed.placement`) and takes its part.
Costs come from FLOPs at first. Where they are measured, they are fitted once to the run's own first steps (after
`FIT_STEPS` of them, or at an earlier save), stored in every checkpoint, and constant from then on: a resumed run places
as the run that wrote the checkpoint would have, so it computes the same sums in the same order.

Measured costs differ from run to run, so two runs with them place and round differently. `measures_costs` decides where
that is acceptable.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import torch

from treewise.distributed import ranks
from treewise.distributed.placement import CostModel, Work, assign_ranks, fit, rank_part, work_of
from treewise.nn.device import synchronized_clock
from treewise.nn.flops import FlopModel
from treewise.planning.partition import ATTENTION_BACKWARD
from treewise.planning.planner import Plan
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")

FIT_STEPS = 16  # steps after which costs are fitted
# Minimum measured steps before costs are fitted: the first is a warm-up, fewer than 3 are too noisy.
MIN_FIT_STEPS = 4
NO_WORK = Work(0.0, 0.0, 0.0)
NUM_ROUNDS = 4  # of a fit of ranks in lockstep

Measurements = list[tuple[Work, float]]  # of one rank: work and seconds of each of its batches
ImageTokens = Callable[[Forest], np.ndarray]


def prior_of(flops: FlopModel) -> CostModel:
    """Estimated costs from the FLOPs of a model, until measurements exist."""
    pair_forward = sum(per_layer for _, per_layer in flops.pair_forward)
    return CostModel.from_flops(_flops_per_token(flops), (1 + ATTENTION_BACKWARD) * pair_forward)


def _flops_per_token(flops: FlopModel) -> float:
    return flops.linear + flops.linear_backward + flops.head + flops.head_backward


def image_tokens_of(flops: FlopModel) -> ImageTokens | None:
    """Maps a forest to [I] float64, how many tokens have the FLOPs of each image on it; None without a tower."""
    vision = flops.vision
    if vision is None:
        return None
    return lambda forest: vision.step(vision.rows_of(forest)) / _flops_per_token(flops)


def measures_costs(source: str, device: torch.device, is_deterministic: bool) -> bool:
    """Whether a run fits its costs to its own steps, by `balance_costs`: `measured`, `flops` (never), or `auto`.

    `auto` measures where a run cannot be repeated bit for bit anyway. On a CPU it can, and a run that is killed before
    its first checkpoint must end with exactly the weights of an undisturbed one; the same holds under transformers'
    `full_determinism`.
    """
    if source == "auto":
        return device.type != "cpu" and not is_deterministic
    return source == "measured"


class OnlinePlacer:
    """Places the batches of a run.

    max_tokens: the budget that placements assume; the same on all ranks. weighting: the objective's. fits: whether
    costs are fitted to measured steps. in_lockstep: whether ranks run their passes side by side (sharded parameters),
    so that all take the time of the slowest. ranks_per_batch: neighbouring ranks that compute one part together.
    image_tokens: maps a forest to the costs of its images, in the sense of `assign_ranks`; None: they cost nothing.
    """

    def __init__(
        self,
        prior: CostModel,
        max_tokens: int | None,
        weighting: str,
        *,
        fits: bool = True,
        in_lockstep: bool = False,
        ranks_per_batch: int = 1,
        image_tokens: ImageTokens | None = None,
    ) -> None:
        self._image_tokens = image_tokens
        self.max_tokens, self.weighting = max_tokens, weighting
        self.fits, self.in_lockstep, self.ranks_per_batch = fits, in_lockstep, ranks_per_batch
        self._costs = [(0, prior)]  # the first step of each cost model
        self._measurements: Measurements = []
        self._num_steps = 0

    @property
    def is_measuring(self) -> bool:
        return self.fits and len(self._costs) == 1

    def costs_at(self, step: int) -> CostModel:
        """The costs that step `step` (from 0) is placed with."""
        return next(costs for start, costs in reversed(self._costs) if start <= step)

    # -- measuring ----------------------------------------------------------------------------------------------------

    @contextmanager
    def measure(self, plan: Plan | None, device: torch.device) -> Iterator[None]:
        """Measures the computation of a batch, of which this rank runs `plan` (None: nothing). All ranks call this for
        every batch, so their measurements line up.
        """
        started = synchronized_clock(device)
        yield
        work = NO_WORK
        if plan is not None:
            images, cost_of, tokens = plan.forest.images, self._image_tokens, 0.0
            if cost_of is not None and len(images):
                tokens = float(cost_of(plan.forest)[images.is_first_place].sum())
            work = work_of(plan, tokens)
        self._measurements.append((work, synchronized_clock(device) - started))

    def on_step_end(self, num_steps: int) -> None:
        """Collective. Called after optimizer step `num_steps`; one of the first calls fits the costs."""
        if self.is_measuring:
            self._num_steps += 1
            if self._num_steps >= FIT_STEPS:
                self._fit(num_steps)

    def before_save(self, num_steps: int) -> None:
        """Collective. Called before the run is saved after `num_steps` steps: fits the costs now if there are enough
        measurements, because a resumed run must place as this one does. A run that is resumed from a checkpoint without
        fitted costs fits its own.
        """
        if self.is_measuring and self._num_steps >= MIN_FIT_STEPS:
            self._fit(num_steps)

    def _fit(self, num_steps: int) -> None:
        """Fits to the measurements of all ranks, for the steps after the next one, which is placed already."""
        measured = ranks.on_every_rank(lambda: self._measurements[1:])  # the first batch is a warm-up
        measurements = measured[:: self.ranks_per_batch]
        prior = self._costs[0][1]
        fitted = ranks.on_first_rank(lambda: astuple(fit_costs(prior, measurements, in_lockstep=self.in_lockstep)))
        costs = CostModel(*fitted)
        self._costs.append((num_steps + 1, costs))
        self._measurements = []
        if ranks.own() == 0:
            logger.info("from step %d on, placement uses costs fitted to measured steps: %s", num_steps + 2, costs)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> list[list[Any]]:
        """`[first step, seconds per token, per pair, per micro-batch]` of each cost model, for a checkpoint."""
        return [[start, *astuple(costs)] for start, costs in self._costs]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Sets the cost models from `state()`."""
        self._costs = [(int(start), CostModel(*costs)) for start, *costs in state]

    def own_part(self, step: int, batch: Sequence[Forest]) -> list[Forest]:
        """This rank's part of the batch of step `step` (from 0)."""
        if not batch:
            return []
        placement = assign_ranks(
            batch,
            ranks.count() // self.ranks_per_batch,
            self.costs_at(step),
            max_tokens=self.max_tokens,
            in_lockstep=self.in_lockstep,
            image_tokens=None if self._image_tokens is None else [self._image_tokens(forest) for forest in batch],
        )
        return rank_part(batch, placement, ranks.own() // self.ranks_per_batch, self.weighting)


def fit_costs(prior: CostModel, measurements: Sequence[Measurements], *, in_lockstep: bool) -> CostModel:
    """Costs from the measurements of all ranks: every rank's batch is one, or where ranks run their passes side by side
    every batch, whose time is that of the slowest rank's work.

    Which rank that is depends on the costs, so these are fitted again to the slowest ranks of the round before. The
    passes of a batch are those of the rank with the most, since the others run empty ones. Where ranks differ in how
    long they waited for the batch to begin, the shortest time is the one without waiting.
    """
    if not in_lockstep:
        return fit(prior, *zip(*(each for own in measurements for each in own), strict=True))
    works: list[list[Work]] = []
    seconds: list[float] = []
    for batch in zip(*measurements, strict=True):
        passes = max(work.micro_batches for work, _ in batch)
        works.append([replace(work, micro_batches=passes) for work, _ in batch])
        seconds.append(min(time for _, time in batch))
    costs = prior
    for _ in range(NUM_ROUNDS):
        costs = fit(prior, [max(each, key=costs.seconds) for each in works], seconds)
    return costs
