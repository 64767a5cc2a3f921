"""Losses on restored trajectories: small pure functions that never see a tree.

An objective says which tokens it needs, hands over streams, and maps what the model says about these tokens to losses,
as it would for flat trajectories. Restoring is a gather, and the transpose of that gather is gradient restoration (Tree
Training, arXiv 2511.00413), so what is exact on flat trajectories is exact on trees.
"""

from treewise.objectives.distillation import Distillation
from treewise.objectives.policy_gradient import PolicyGradient, logprob_gap
from treewise.objectives.protocol import Objective, Terms
from treewise.objectives.registry import CISPO, DAPO, GRPO, GSPO, PPO, REINFORCE, DrGRPO, objective_named
from treewise.objectives.sft import NORMALIZATIONS, SFT
from treewise.tree.weights import WEIGHTINGS

__all__ = [
    "CISPO",
    "DAPO",
    "Distillation",
    "DrGRPO",
    "GRPO",
    "GSPO",
    "NORMALIZATIONS",
    "Objective",
    "PPO",
    "PolicyGradient",
    "REINFORCE",
    "SFT",
    "Terms",
    "WEIGHTINGS",
    "logprob_gap",
    "objective_named",
]
