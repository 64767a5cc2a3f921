"""Many ranks: who trains which trajectories, and how all of them take part in every collective operation."""

from treewise.balance.costs import CostFit, CostModel, Work, fit, work_of
from treewise.balance.placement import Placement, place
from treewise.balance.shares import part_of, share_of

__all__ = ["CostFit", "CostModel", "Placement", "Work", "fit", "part_of", "place", "share_of", "work_of"]
