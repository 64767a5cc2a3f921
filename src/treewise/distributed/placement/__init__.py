"""Which rank trains which trajectories of a step (NumPy only).

assign_ranks     which rank trains which trajectory, so that the slowest is as fast as possible
rank_part        the forests of one rank
restrict_forest  the forest of some trajectories of another
"""

from treewise.distributed.placement.cost_model import CostModel, Work, work_of
from treewise.distributed.placement.placement import Placement, assign_ranks
from treewise.distributed.placement.split import rank_part, restrict_forest

__all__ = [
    "CostModel",
    "Placement",
    "Work",
    "assign_ranks",
    "rank_part",
    "restrict_forest",
    "work_of",
]
