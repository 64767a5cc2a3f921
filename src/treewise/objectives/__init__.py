"""Losses on restored trajectories: small pure functions that never see a tree.

An objective selects tokens and their streams, and maps the model's values of these tokens (log-probs, entropies) to
losses, as it would for flat trajectories. Restoring is a gather, and the transpose of that gather is gradient
restoration (Tree Training, arXiv 2511.00413), so what is exact on flat trajectories is exact on trees.
"""

from treewise.objectives.distillation import Distillation
from treewise.objectives.policy_gradient import PolicyGradient, logprob_gap
from treewise.objectives.preference import DPO, IPO, KTO, with_mismatched
from treewise.objectives.protocol import Objective, Terms
from treewise.objectives.registry import CISPO, DAPO, GRPO, GSPO, PPO, REINFORCE, DrGRPO, objective_named
from treewise.objectives.sft import NORMALIZATIONS, SFT
from treewise.tree.forest import WEIGHTINGS

__all__ = [
    "CISPO",
    "DAPO",
    "DPO",
    "Distillation",
    "DrGRPO",
    "GRPO",
    "GSPO",
    "IPO",
    "KTO",
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
    "with_mismatched",
]
