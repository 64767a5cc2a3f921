"""Executes a plan: forward, backward, gateways, budgets."""

from treewise.engine.engine import TreeEngine
from treewise.engine.scoring import StepOutput

__all__ = ["StepOutput", "TreeEngine"]
