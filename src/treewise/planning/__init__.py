"""A forest and a budget to micro-batches and their schedule (NumPy only)."""

from treewise.planning.planner import plan
from treewise.planning.plans import Plan

__all__ = ["Plan", "plan"]
