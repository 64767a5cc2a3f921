"""Recurrent layers in a walk: each micro-batch gets its segments, which its layers share."""

import numpy as np
import torch

from treewise.nn.attention import Gateway, TreeContext, TreeMask
from treewise.nn.decoder import DecoderAndHead, run_decoder
from treewise.nn.guest import Guest, RunningMicroBatch
from treewise.nn.recurrent.rows import TreeRows
from treewise.planning.planner import plan as make_plan
from treewise.planning.plans import Plan, lay_out
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


class RecurrentRows(Guest):
    """The segments of a plan's micro-batches."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def enter(self, run: RunningMicroBatch) -> None:
        """Before the first forward, for the layout that other guests have left."""
        if run.rows is None:
            run.rows = TreeRows(self._plan, run.index, run.layout)


@torch.no_grad()
def state_bytes(lm: DecoderAndHead) -> int:
    """Bytes that recurrent layers keep in a gateway for one token that is continued elsewhere, gradients included.

    Measured on a tree of two tokens.
    """
    plan = make_plan(Forest.from_trajectories([Trajectory(np.zeros(2, dtype=np.int32))]), 1, hold="never")
    layout, gateway = lay_out(plan, 0), Gateway()
    context = TreeContext(TreeMask.from_layout(layout), "reference", writes=gateway, rows=TreeRows(plan, 0, layout))
    run_decoder(lm, layout.token_ids, layout.depth, context)
    return sum(each.numel() * (each.element_size() + max(4, each.element_size())) for each in gateway.states.values())
