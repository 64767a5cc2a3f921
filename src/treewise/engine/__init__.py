"""Executes a plan: forward, backward, gateways, budgets."""

from treewise.engine.engine import TreeEngine

__all__ = ["TreeEngine"]
