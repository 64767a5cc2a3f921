"""Lockstep: every rank runs the same sequence of forwards and backwards, because each is a collective operation."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from treewise.distributed.lockstep.merged_sequence import RankTurn
from treewise.distributed.lockstep.turns import NO_PASSES, Passes, forward_passes, training_passes, turns_of
from treewise.nn.guest import Guest
from treewise.planning.planner import plan as make_plan
from treewise.planning.plans import BACKWARD, FORWARD, HOLD, Pass, Plan
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

DONE = "."  # the text of a rank that has no walk left

Exchange = Callable[[str], list[str]]  # own sequence -> those of all ranks


class Lockstep(Guest):
    """Keeps the walks of this rank in lockstep with those of others.

    exchange: sends this rank's text to all ranks and returns everybody's, in the order of ranks. new_walk: a walk over
    a plan, of which this is a guest; empty passes run one over two tokens. within_backward: see `Guest`.
    """

    in_lockstep = True

    def __init__(
        self,
        exchange: Exchange,
        new_walk: Callable[[Plan], Any],
        within_backward: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.within_backward = within_backward
        chain = make_plan(Forest.from_trajectories([Trajectory(np.zeros(2, dtype=np.int32))]))
        self._exchange, self._empty_rows = exchange, lambda: new_walk(chain).forward(0).hidden
        self._held: list[torch.Tensor] = []

    def passes(self, plan: Plan, _: Iterable[Pass]) -> Iterator[Pass]:
        """The passes of a plan's schedule at their turns, with the empty passes in between.

        Micro-batches that read no gateway may come in another order than in the schedule.
        """
        for turn in self._turns(training_passes(plan)):
            if turn.own_step is None:
                self._run_empty(turn.action)
            else:
                yield plan.schedule[turn.own_step]

    def turns(self, plan: Plan, _: Iterator[None]) -> Iterator[None]:
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

    def _turns(self, own: Passes) -> list[RankTurn]:
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
