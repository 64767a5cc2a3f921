"""For tests of your own: tiny models, random trees, flat training as an oracle, and an assertion that compares them.

Who writes an objective, a recurrent layer or an attention finds here what treewise tests its own with. The strategies
need hypothesis (`pip install 'hypothesis>=6.136'`); the rest needs nothing more than treewise. docs/testing.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treewise.nn.whole_gradients import gradient_error, gradients_of
    from treewise.testing.families import causal_families, tiny_model
    from treewise.testing.oracle import assert_equals_flat, flat_logprobs, flat_loss, flat_sft
    from treewise.testing.strategies import (
        budgets,
        declared_nodes,
        forests,
        forests_and_budgets,
        random_tree,
        token_lists,
        trajectories,
    )

__all__ = [
    "assert_equals_flat",
    "budgets",
    "causal_families",
    "declared_nodes",
    "flat_logprobs",
    "flat_loss",
    "flat_sft",
    "forests",
    "forests_and_budgets",
    "gradient_error",
    "gradients_of",
    "random_tree",
    "tiny_model",
    "token_lists",
    "trajectories",
]

_MODULES = {
    "families": ("causal_families", "tiny_model"),
    "oracle": ("assert_equals_flat", "flat_logprobs", "flat_loss", "flat_sft", "gradient_error", "gradients_of"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'treewise.testing' has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "strategies")
    return getattr(import_module(f"treewise.testing.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
