"""Many ranks: who trains which trajectories, and how all of them take part in every collective operation.

place       which rank trains which trajectory of a step, so that the slowest is as fast as possible
share_of    one rank's forests
passes_of, merged, slots_of     the common sequence of forwards and backwards, and a rank's part in it
CostFit     prices of tokens, pairs and micro-batches, fitted to the run's own steps
made_ahead  all this for the next step while this one runs
"""

from treewise.balance.ahead import made_ahead
from treewise.balance.costs import CostFit, CostModel, Work, fit, work_of
from treewise.balance.placement import Placement, place
from treewise.balance.schedules import Slot, equal_schedules, merged, passes_of, slots_of
from treewise.balance.shares import part_of, share_of

__all__ = [
    "CostFit",
    "CostModel",
    "Placement",
    "Slot",
    "Work",
    "passes_of",
    "equal_schedules",
    "fit",
    "made_ahead",
    "merged",
    "part_of",
    "place",
    "share_of",
    "slots_of",
    "work_of",
]
