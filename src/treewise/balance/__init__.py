"""Many ranks: who trains which trajectories, and how all of them take part in every collective operation.

place       which rank trains which trajectory of a step, so that the slowest is as fast as possible
share_of    one rank's forests
training_passes, turns_of       the common turns of forwards and backwards, and what a rank runs at each
CostFit     prices of tokens, pairs and micro-batches, fitted to the run's own steps
made_ahead  all this for the next step while this one runs
"""

from treewise.balance.ahead import made_ahead
from treewise.balance.costs import CostFit, CostModel, Work, fit, work_of
from treewise.balance.placement import Placement, place
from treewise.balance.schedules import Slot, merged, slots_of
from treewise.balance.shares import part_of, share_of
from treewise.balance.turns import Passes, equal_schedules, training_passes, turns_of, visiting_passes

__all__ = [
    "CostFit",
    "CostModel",
    "Passes",
    "Placement",
    "Slot",
    "Work",
    "equal_schedules",
    "fit",
    "made_ahead",
    "merged",
    "part_of",
    "place",
    "share_of",
    "slots_of",
    "training_passes",
    "turns_of",
    "visiting_passes",
    "work_of",
]
