"""Executes a plan: forward, backward, gateways, budgets."""

from treewise.engine.engine import TreeEngine
from treewise.engine.prepared import StepOutput

__all__ = ["StepOutput", "TreeEngine"]
