"""Layers from before transformers' attention interface: GPT-Neo; GPT-J and CodeGen before transformers 5.24.

They compute their scores in a method `_attn` of their own, which they call with queries, keys and values with positions
already in them, and the mask, which carries the tree. A layer's instance gets an `_attn` that follows the tree if one
is given; its class is unchanged.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from treewise.nn.attention import mask_audit
from treewise.nn.attention.interface import attend, context_of, layer_rule


def _divided(layer: Any) -> dict[str, Any]:
    return {"scaling": 1.0 / float(layer.scale_attn)}


# Class of a layer -> the arguments that it would give to the attention interface.
_RULES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "CodeGenAttention": _divided,
    "GPTJAttention": _divided,
    # It does not scale its scores, and its local layers see the last `window_size` tokens.
    "GPTNeoSelfAttention": lambda layer: {
        "scaling": 1.0,
        "sliding_window": layer.config.window_size if layer.attention_type == "local" else None,
    },
}


def install(decoder: nn.Module) -> bool:
    """Lets these layers of a decoder follow the tree that its mask carries; twice changes nothing. Whether there are
    some.
    """
    found = [each for each in decoder.modules() if type(each).__name__ in _RULES and hasattr(each, "_attn")]
    for module in found:
        module.__dict__.setdefault("_attn", MethodType(_attn, module))
    return bool(found)


def _attn(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[1, H, T, D] in, ([1, H, T, D], weights) out."""
    context = context_of(self, attention_mask)
    if context is not None:
        return attend(self, query, key, value, context, _RULES[type(self).__name__](self)).transpose(1, 2), None
    if mask_audit.is_observing():
        rule = layer_rule(self, query, _RULES[type(self).__name__](self))
        # A local layer hides keys by a table of its own, so its window is not in the mask.
        mask_audit.record(self, rule, attention_mask if rule.window is None else None)
    return type(self)._attn(self, query, key, value, attention_mask)  # noqa: SLF001
