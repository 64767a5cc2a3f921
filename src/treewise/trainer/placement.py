"""Which rank trains which trajectories of a step: `treewise.balance` at work in a run.

Every rank sees all trees of a batch, computes the same placement, and takes its share. Prices come from FLOPs at first,
and once from the run's own first steps. They are fitted at the first save, are kept in every checkpoint, and hold from
then on: a resumed run places as the uninterrupted one did, so it computes the same sums in the same order.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

from treewise.balance import CostFit, CostModel, Work, made_ahead, place, share_of, work_of
from treewise.flops import FlopModel
from treewise.forest import Forest
from treewise.planner import Plan
from treewise.trainer import ranks

PAIR_TRAINING = 3.5  # forward and backward of attention, in forwards (the backward computes the scores again)


def prior_of(flops: FlopModel) -> CostModel:
    """Prices before anything is measured."""
    per_token = flops.linear + flops.linear_backward + flops.head + flops.head_backward
    return CostModel.from_flops(per_token, PAIR_TRAINING * sum(per_pair for _, per_pair in flops.pair_forward))


class Placing:
    """Places the batches of a run.

    max_tokens: the budget that placements reckon with; the same on all ranks. weighting: the objective's.
    """

    def __init__(self, prior: CostModel, max_tokens: int | None, weighting: str) -> None:
        self.max_tokens, self.weighting = max_tokens, weighting
        self._prices = [(0, prior)]  # from which step on, which prices
        self._measured: list[tuple[Work, float]] = []

    @property
    def is_fitted(self) -> bool:
        return len(self._prices) > 1

    def shares(self, batches: Iterator[list[Forest]], first_step: int, batches_per_step: int) -> Iterator[list[Forest]]:
        """This rank's share of each batch; the next batch is placed while the caller computes one."""
        numbered = ((first_step + number // batches_per_step, batch) for number, batch in enumerate(batches))
        return made_ahead(numbered, lambda item: self._share(*item))

    def prices_at(self, step: int) -> CostModel:
        """The prices of a step (0 is the first)."""
        return next(prices for start, prices in reversed(self._prices) if start <= step)

    @contextmanager
    def measured(self, plans: list[Plan]) -> Iterator[None]:
        """Measures the computation of `plans`, which the caller fills. Not the first, which warms up."""
        started = time.perf_counter()
        yield
        if plans and not self.is_fitted:
            work = sum((work_of(plan) for plan in plans[1:]), work_of(plans[0]))
            self._measured.append((work, time.perf_counter() - started))

    def fit(self, step: int) -> None:
        """Fits the prices to what all ranks measured so far, once; for the steps after the next one, which is placed
        already. Every rank calls this after `step` steps.
        """
        if self.is_fitted:
            return
        everything = ranks.on_every_rank(lambda: self._measured[1:])

        def fitted() -> tuple[float, ...]:
            fit = CostFit(self._prices[0][1])
            for measured in everything:
                for work, seconds in measured:
                    fit.add(work, seconds)
            return astuple(fit.model())

        self._prices.append((step + 1, CostModel(*ranks.on_first_rank(fitted))))

    def facts(self) -> list[list[Any]]:
        """What a checkpoint keeps."""
        return [[start, *astuple(prices)] for start, prices in self._prices]

    def restore(self, facts: Sequence[Sequence[Any]]) -> None:
        """Puts back what `facts` gave."""
        self._prices = [(int(start), CostModel(*prices)) for start, *prices in facts]

    def _share(self, step: int, batch: list[Forest]) -> list[Forest]:
        if not batch:
            return []
        placed = place(batch, ranks.count(), self.prices_at(step), max_tokens=self.max_tokens)
        return share_of(batch, placed, ranks.own(), self.weighting)
