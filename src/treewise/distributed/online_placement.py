"""Which rank trains which trajectories of a step: `treewise.distributed.placement` at work in a run.

Every rank sees all trees of a batch, computes the same placement, and takes its share. Prices come from FLOPs at first.
Where they are to be measured, they are fitted once to the run's own first steps (after `FIT_STEPS` of them, or at an
earlier save), are kept in every checkpoint, and hold from then on: a resumed run places as the one that wrote the
checkpoint would have, so it computes the same sums in the same order.

Measured prices are never the same twice, so two runs with them place differently and round differently. That is why
`prices` says who may choose: see `wants_measured`.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import torch

from treewise.distributed import ranks
from treewise.distributed.placement import CostFit, CostModel, Work, place, share_of, work_of
from treewise.distributed.placement.cost_model import ODD_RATIO
from treewise.distributed.prefetch import made_ahead
from treewise.nn.device import synchronized_clock
from treewise.nn.flops import FlopModel
from treewise.planning.planner import Plan
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")

PRICES = ("auto", "flops", "measured")
PAIR_TRAINING = 3.5  # forward and backward of attention, in forwards (the backward computes the scores again)
FIT_STEPS = 16  # steps after which prices are fitted
FEWEST_STEPS = 4  # a save before this many measured steps does not fit: the first one warms up, two say nothing
NOTHING = Work(0.0, 0.0, 0.0)
# Where the search for prices of ranks in step begins: shares of the prior's price of a pair; and its rounds from each.
_PAIR_STARTS = (1.0, 0.03, 0.2, 5.0, 30.0)
_ROUNDS = 4

Measured = list[tuple[Work, float]]  # of one rank: each batch's own work and seconds


def prior_of(flops: FlopModel) -> CostModel:
    """Prices before anything is measured."""
    per_token = flops.linear + flops.linear_backward + flops.head + flops.head_backward
    return CostModel.from_flops(per_token, PAIR_TRAINING * sum(per_pair for _, per_pair in flops.pair_forward))


def wants_measured(prices: str, device: torch.device, is_deterministic: bool) -> bool:
    """Whether a run's prices are fitted to its own steps: `measured`, `flops` (never), or `auto`.

    `auto` measures where a run cannot be repeated bit for bit anyway. On a CPU it can, and a run that is killed before
    its first checkpoint must end with the very weights of an undisturbed one; so it can where transformers'
    `full_determinism` is set.
    """
    if prices == "auto":
        return device.type != "cpu" and not is_deterministic
    return prices == "measured"


class Placing:
    """Places the batches of a run.

    max_tokens: the budget that placements reckon with; the same on all ranks. weighting: the objective's. fits: whether
    prices are fitted to measured steps. is_in_step: whether ranks run their passes side by side (sharded parameters),
    so that all take the time of the slowest.
    """

    def __init__(
        self,
        prior: CostModel,
        max_tokens: int | None,
        weighting: str,
        *,
        fits: bool = True,
        is_in_step: bool = False,
    ) -> None:
        self.max_tokens, self.weighting = max_tokens, weighting
        self.fits, self.is_in_step = fits, is_in_step
        self._prices = [(0, prior)]  # from which step on, which prices
        self._measured: Measured = []
        self._num_steps = 0

    @property
    def is_fitted(self) -> bool:
        return len(self._prices) > 1

    @property
    def is_measuring(self) -> bool:
        return self.fits and not self.is_fitted

    def shares(self, batches: Iterator[list[Forest]], first_step: int, batches_per_step: int) -> Iterator[list[Forest]]:
        """This rank's share of each batch; the next batch is placed while the caller computes one."""
        numbered = ((first_step + number // batches_per_step, batch) for number, batch in enumerate(batches))
        return made_ahead(numbered, lambda item: self._share(*item))

    def prices_at(self, step: int) -> CostModel:
        """The prices of a step (0 is the first)."""
        return next(prices for start, prices in reversed(self._prices) if start <= step)

    # -- measuring ----------------------------------------------------------------------------------------------------

    @contextmanager
    def measured(self, plan: Plan | None, device: torch.device) -> Iterator[None]:
        """Measures the computation of a batch, of which this rank runs `plan` (None: nothing). All ranks call this for
        every batch, so their measurements line up.
        """
        started = synchronized_clock(device)
        yield
        self.add(NOTHING if plan is None else work_of(plan), synchronized_clock(device) - started)

    def add(self, work: Work, seconds: float) -> None:
        """One batch of this rank."""
        self._measured.append((work, seconds))

    def step_done(self, num_steps: int) -> None:
        """Every rank calls this after the optimizer's step number `num_steps`; one of the first calls fits."""
        if self.is_measuring:
            self._num_steps += 1
            if self._num_steps >= FIT_STEPS:
                self._fit(num_steps)

    def saving(self, num_steps: int) -> None:
        """Every rank calls this before the run is saved after `num_steps` steps. What is saved must place as what goes
        on, so the prices are fitted now, if there is enough to fit them to. A run that is resumed from a checkpoint
        without fitted prices fits its own.
        """
        if self.is_measuring and self._num_steps >= FEWEST_STEPS:
            self._fit(num_steps)

    def _fit(self, num_steps: int) -> None:
        """Fits to what all ranks measured; for the steps after the next one, which is placed already."""
        everything = ranks.on_every_rank(lambda: self._measured[1:])  # the first batch warms up
        prior = self._prices[0][1]
        fitted = fitted_in_step if self.is_in_step else fitted_alone
        prices = CostModel(*ranks.on_first_rank(lambda: astuple(fitted(prior, everything))))
        self._prices.append((num_steps + 1, prices))
        self._measured = []
        if ranks.own() == 0:
            logger.info("prices of placements from step %d on: %s", num_steps + 2, prices)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def facts(self) -> list[list[Any]]:
        """What a checkpoint keeps."""
        return [[start, *astuple(prices)] for start, prices in self._prices]

    def restore(self, facts: Sequence[Sequence[Any]]) -> None:
        """Puts back what `facts` gave."""
        self._prices = [(int(start), CostModel(*prices)) for start, *prices in facts]

    def _share(self, step: int, batch: list[Forest]) -> list[Forest]:
        if not batch:
            return []
        prices, in_step = self.prices_at(step), self.is_in_step
        placed = place(batch, ranks.count(), prices, max_tokens=self.max_tokens, in_step=in_step)
        return share_of(batch, placed, ranks.own(), self.weighting)


def fitted_alone(prior: CostModel, everything: Sequence[Measured]) -> CostModel:
    """Prices from ranks that compute each for itself: every rank's batch is a measurement."""
    fit = CostFit(prior)
    for batch in zip(*everything, strict=True):
        for work, seconds in batch:
            fit.add(work, seconds)
    return fit.model()


def fitted_in_step(prior: CostModel, everything: Sequence[Measured]) -> CostModel:
    """Prices from ranks that run their passes side by side: a batch's time is that of the slowest rank's work.

    Which rank that is depends on the price of a pair beside that of a token, so the fit starts from several and follows
    each for a few rounds; the prices that leave the least error (Cauchy's, as `cost_model.fit` weighs it) win.
    The passes of a batch are those of the rank with the most, since the others run empty ones. Where ranks differ in
    how long they waited for the batch to begin, the shortest time is the one without waiting.
    """
    batches: list[tuple[list[Work], float]] = []
    for batch in zip(*everything, strict=True):
        passes = max(work.micro_batches for work, _ in batch)
        works = [replace(work, micro_batches=passes) for work, _ in batch if work.tokens]
        if works:
            batches.append((works, min(seconds for _, seconds in batch)))
    starts = [replace(prior, seconds_per_pair=share * prior.seconds_per_pair) for share in _PAIR_STARTS]
    found = [_followed(prior, start, batches) for start in starts]
    return min(found, key=lambda prices: _error(prices, batches))


def _followed(prior: CostModel, prices: CostModel, batches: Sequence[tuple[list[Work], float]]) -> CostModel:
    """Prices whose slowest ranks are those that they were fitted to, or nearly so."""
    for _ in range(_ROUNDS):
        fit = CostFit(prior)
        for works, seconds in batches:
            fit.add(max(works, key=prices.seconds), seconds)
        prices = fit.model()
    return prices


def _error(prices: CostModel, batches: Sequence[tuple[list[Work], float]]) -> float:
    ratios = (max(map(prices.seconds, works)) / seconds for works, seconds in batches)
    return sum(math.log1p(((ratio - 1) / ODD_RATIO) ** 2) for ratio in ratios)
