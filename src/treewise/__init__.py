"""treewise: train language models on trees of tokens, with exactly the gradients of training each trajectory alone.

The NumPy heart is imported at once; everything that needs torch is imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treewise import advantages
from treewise.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    OutOfMemoryError,
    PlanError,
    StoppedError,
    TreewiseError,
    UnsupportedModelError,
    VerificationError,
)
from treewise.planning.planner import Plan, plan
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from treewise.engine import TreeEngine
    from treewise.integrations.trl import share_prefixes
    from treewise.objectives import (
        CISPO,
        DAPO,
        GRPO,
        GSPO,
        PPO,
        REINFORCE,
        SFT,
        Distillation,
        DrGRPO,
        PolicyGradient,
        logprob_gap,
    )
    from treewise.trainer import TreeTrainer, TreeTrainingArguments
    from treewise.verification import verify

__version__ = "0.1.0"

_LAZY = {
    "CISPO": "treewise.objectives",
    "DAPO": "treewise.objectives",
    "Distillation": "treewise.objectives",
    "DrGRPO": "treewise.objectives",
    "GRPO": "treewise.objectives",
    "GSPO": "treewise.objectives",
    "PPO": "treewise.objectives",
    "PolicyGradient": "treewise.objectives",
    "REINFORCE": "treewise.objectives",
    "SFT": "treewise.objectives",
    "logprob_gap": "treewise.objectives",
    "TreeEngine": "treewise.engine",
    "TreeTrainer": "treewise.trainer",
    "TreeTrainingArguments": "treewise.trainer",
    "share_prefixes": "treewise.integrations.trl",
    "verify": "treewise.verification",
}

__all__ = [
    "CISPO",
    "DAPO",
    "Distillation",
    "DrGRPO",
    "GRPO",
    "GSPO",
    "PPO",
    "PolicyGradient",
    "REINFORCE",
    "SFT",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Forest",
    "NonFiniteError",
    "OutOfMemoryError",
    "Plan",
    "PlanError",
    "StoppedError",
    "Trajectory",
    "TreeEngine",
    "TreeTrainer",
    "TreeTrainingArguments",
    "TreewiseError",
    "UnsupportedModelError",
    "VerificationError",
    "advantages",
    "logprob_gap",
    "plan",
    "share_prefixes",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'treewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
