"""Where rollout trees branch: policies that are pure functions of the tree so far; NumPy only."""

from treewise.rl.branching.policies import BRANCHINGS, Branching, branching_named
from treewise.rl.branching.protocol import Branch, Signals
from treewise.rl.branching.rollout_tree import PROMPT, RolloutNode, RolloutTree

__all__ = [
    "BRANCHINGS",
    "PROMPT",
    "Branch",
    "Branching",
    "RolloutNode",
    "RolloutTree",
    "Signals",
    "branching_named",
]
