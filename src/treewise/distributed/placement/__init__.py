"""Which rank trains which trajectories of a step (NumPy only).

place       which rank trains which trajectory of a step, so that the slowest is as fast as possible
share_of    one rank's forests
CostFit     costs of tokens, pairs and micro-batches, fitted to the run's own steps
"""

from treewise.distributed.placement.cost_model import CostFit, CostModel, Work, fit, work_of
from treewise.distributed.placement.placement import Placement, place
from treewise.distributed.placement.split import part_of, share_of

__all__ = [
    "CostFit",
    "CostModel",
    "Placement",
    "Work",
    "fit",
    "part_of",
    "place",
    "share_of",
    "work_of",
]
