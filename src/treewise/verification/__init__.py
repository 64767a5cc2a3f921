"""Flat training against tree training, on a model and rows of the user."""

from treewise.verification.compare import verify

__all__ = ["verify"]
