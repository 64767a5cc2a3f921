"""Walks of several ranks in step: every rank runs the same sequence of forwards and backwards.

Sharded parameters are gathered layer by layer in each forward and backward, by collective operations that all ranks
must call in the same order. So ranks exchange the sequences of their walks before each one, and run empty passes where
another rank has one more (`balance.turns`). How many walks a step takes may differ from rank to rank, too: one that
has done its own keeps the others company until all have.
"""

from collections.abc import Callable, Iterator

import torch

from treewise.distributed.lockstep.common_sequence import Turn
from treewise.distributed.lockstep.turns import NO_PASSES, Passes, forward_passes, training_passes, turns_of
from treewise.planning.planner import BACKWARD, FORWARD, HOLD, Pass, Plan

DONE = "."  # what a rank says that has no walk left

Exchange = Callable[[str], list[str]]  # own sequence -> those of all ranks


class Pace:
    """Keeps the walks of this rank in step with those of others.

    exchange: hands this rank's text to all and returns everybody's, in the order of ranks. empty_rows: hidden rows of a
    forward over a token or two, with a graph where gradients are on.
    """

    def __init__(self, exchange: Exchange, empty_rows: Callable[[], torch.Tensor]) -> None:
        self._exchange, self._empty_rows = exchange, empty_rows
        self._held: list[torch.Tensor] = []

    def steps(self, plan: Plan) -> Iterator[Pass]:
        """The steps of a plan's schedule at their turns, with the empty passes in between.

        Micro-batches that read no gateway may come in another order than in the schedule.
        """
        for slot in self._slots(training_passes(plan)):
            if slot.own_step is None:
                self._run_empty(slot.action)
            else:
                yield plan.schedule[slot.own_step]

    def forwards(self, plan: Plan) -> Iterator[None]:
        """A turn for each forward of a visit; after the last one, the empty passes that are left."""
        for slot in self._slots(forward_passes(plan)):
            if slot.own_step is None:
                self._run_empty(slot.action)
            else:
                yield

    def finish(self) -> None:
        """Runs empty passes until every rank has done its walks."""
        while sequences := [each for each in self._exchange(DONE) if each != DONE]:
            for slot in turns_of(NO_PASSES, [NO_PASSES, *map(Passes.from_text, sequences)]):
                self._run_empty(slot.action)

    def _slots(self, own: Passes) -> list[Turn]:
        said = self._exchange(own.text)
        # Ranks that are done run all of it empty, so the common sequence must be one that an idle rank can follow.
        return turns_of(own, [NO_PASSES if each == DONE else Passes.from_text(each) for each in said])

    def _run_empty(self, action: str) -> None:
        if action == FORWARD:
            with torch.no_grad():
                self._empty_rows()
        elif action == HOLD:
            self._held.append(_with_graph(self._empty_rows))
        else:
            rows = self._held.pop() if action == BACKWARD else _with_graph(self._empty_rows)
            torch.autograd.backward(rows, torch.zeros_like(rows))


def _with_graph(rows_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.enable_grad():
        return rows_of()
