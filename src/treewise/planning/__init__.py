"""A forest and a budget to micro-batches and their schedule (NumPy only)."""

from treewise.planning.planner import Plan, plan

__all__ = ["Plan", "plan"]
