"""Token sequences to forests: prefix trees in depth-first order (NumPy only)."""

from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

__all__ = ["Forest", "Trajectory"]
