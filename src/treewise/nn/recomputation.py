"""The switch of layers that are computed again in the backward (gradient checkpointing)."""

from collections.abc import Mapping
from typing import Any


def set_recomputation(model: Any, wanted: bool, settings: Mapping[str, Any] | None = None) -> None:
    """Switches layers that are computed again on or off. settings: transformers' `activation_checkpointing_kwargs`."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # before transformers 5.23
    is_on = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    if wanted == is_on:
        return
    if not wanted:
        getattr(model, f"{name}_checkpointing_disable")()
        return
    given = dict(settings or {})
    beside = {key: given.pop(key) for key in ("every_n_layers", "offload") if key in given}
    getattr(model, f"{name}_checkpointing_enable")(given or None, **beside)
