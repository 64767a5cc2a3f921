"""Lockstep: every rank runs the same sequence of forwards and backwards.

Sharded parameters are gathered layer by layer in each forward and backward, by collective operations that all ranks
must call in the same order. So ranks exchange the sequences of their walks before each one, and run an empty pass where
another rank has one more (`distributed.lockstep.turns`). The number of walks in a step may differ from rank to rank,
too: a rank that finishes early runs empty passes until all are done.
"""

from collections.abc import Callable, Iterator

import torch

from treewise.distributed.lockstep.merged_sequence import Turn
from treewise.distributed.lockstep.turns import NO_PASSES, Passes, forward_passes, training_passes, turns_of
from treewise.planning.planner import BACKWARD, FORWARD, HOLD, Pass, Plan

DONE = "."  # the text of a rank that has no walk left

Exchange = Callable[[str], list[str]]  # own sequence -> those of all ranks


class Lockstep:
    """Keeps the walks of this rank in lockstep with those of others.

    exchange: sends this rank's text to all ranks and returns everybody's, in the order of ranks. empty_rows: returns
    [T, M] hidden rows of a forward over a token or two, with a graph where gradients are enabled.
    """

    def __init__(self, exchange: Exchange, empty_rows: Callable[[], torch.Tensor]) -> None:
        self._exchange, self._empty_rows = exchange, empty_rows
        self._held: list[torch.Tensor] = []

    def steps(self, plan: Plan) -> Iterator[Pass]:
        """The passes of a plan's schedule at their turns, with the empty passes in between.

        Micro-batches that read no gateway may come in another order than in the schedule.
        """
        for turn in self._turns(training_passes(plan)):
            if turn.own_step is None:
                self._run_empty(turn.action)
            else:
                yield plan.schedule[turn.own_step]

    def forwards(self, plan: Plan) -> Iterator[None]:
        """A turn for each forward of a visit; after the last one, the empty passes that are left."""
        for turn in self._turns(forward_passes(plan)):
            if turn.own_step is None:
                self._run_empty(turn.action)
            else:
                yield

    def drain(self) -> None:
        """Runs empty passes until every rank has finished its walks."""
        while sequences := [each for each in self._exchange(DONE) if each != DONE]:
            for turn in turns_of(NO_PASSES, [NO_PASSES, *map(Passes.from_text, sequences)]):
                self._run_empty(turn.action)

    def _turns(self, own: Passes) -> list[Turn]:
        texts = self._exchange(own.text)
        # Ranks that are done run all of it empty, so the common sequence must be one that an idle rank can follow.
        return turns_of(own, [NO_PASSES if text == DONE else Passes.from_text(text) for text in texts])

    def _run_empty(self, action: str) -> None:
        if action == FORWARD:
            with torch.no_grad():
                self._empty_rows()
        elif action == HOLD:
            self._held.append(_with_graph(self._empty_rows))
        else:
            rows = self._held.pop() if action == BACKWARD else _with_graph(self._empty_rows)
            if rows.requires_grad:  # as in the passes of other ranks: only a head is trained, which is not sharded
                torch.autograd.backward(rows, torch.zeros_like(rows))


def _with_graph(rows_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.enable_grad():
        return rows_of()
