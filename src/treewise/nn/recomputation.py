"""The switch of layers that are computed again in the backward (gradient checkpointing)."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from treewise.nn.platform.releases import recomputation_name


def is_reentrant(module: nn.Module) -> bool:
    """Whether layers of this module, or it itself, are computed again by reentrant checkpoints while it trains.

    Through these a gradient reaches what is given to a layer by position, and nothing else.
    """
    state = vars(module)
    is_on = state.get("gradient_checkpointing") is True and module.training
    return is_on and bool(getattr(state.get("_gradient_checkpointing_func"), "keywords", {}).get("use_reentrant"))


def set_recomputation(model: Any, wanted: bool, settings: Mapping[str, Any] | None = None) -> None:
    """Switches layers that are computed again on or off. settings: transformers' `activation_checkpointing_kwargs`."""
    name = recomputation_name()
    is_on = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    if wanted == is_on:
        return
    if not wanted:
        getattr(model, f"{name}_checkpointing_disable")()
        return
    given = dict(settings or {})
    beside = {key: given.pop(key) for key in ("every_n_layers", "offload") if key in given}
    getattr(model, f"{name}_checkpointing_enable")(given or None, **beside)
