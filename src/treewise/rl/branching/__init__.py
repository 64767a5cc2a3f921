"""Where rollout trees branch: one small policy a file, pure functions of the tree so far; NumPy only."""

from treewise.rl.branching.protocol import Branch, Signals
from treewise.rl.branching.registry import BRANCHINGS, Branching, branching_named
from treewise.rl.branching.rollout_node import PROMPT, RolloutNode
from treewise.rl.branching.rollout_tree import RolloutTree, TokenAccount

__all__ = [
    "BRANCHINGS",
    "PROMPT",
    "Branch",
    "Branching",
    "RolloutNode",
    "RolloutTree",
    "Signals",
    "TokenAccount",
    "branching_named",
]
