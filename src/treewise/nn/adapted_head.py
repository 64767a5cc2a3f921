"""The weight of a head within PEFT's wrappers, where it is one weight: plain LoRA and trained tokens applied.

Letters: M model width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch

from treewise.nn.decoder import has_hooks, plain_weight


def active_module(output: Any) -> Any:
    """What a head within one of PEFT's wrappers runs: the copy that is trained whole (`modules_to_save`), the layer
    with trained tokens (`trainable_token_indices`), or the head itself."""
    if hasattr(output, "token_adapter"):
        return output.token_adapter
    if not hasattr(output, "modules_to_save"):
        return output
    active = output.active_adapters
    if output.disable_adapters or not active or active[0] not in output.modules_to_save:
        return output.original_module
    return output.modules_to_save[active[0]]


def weight_with_adapters(output: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight ([V, M]) and bias ([V]) of a linear layer, plain LoRA or trained tokens applied; None where it is more."""
    apply = _APPLIED.get((type(output).__module__, type(output).__name__))
    if apply is None:
        return plain_weight(output)
    base = None if has_hooks(output) else weight_with_adapters(output.base_layer)
    return None if base is None else apply(output, *base)


def _with_lora(
    output: Any, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The weight with the active adapters, in the graph of both; None for variants of LoRA, which add more."""
    if output.merged:
        return None if output.disable_adapters else (weight, bias)  # its forward takes merged adapters out again
    if output.disable_adapters:
        return weight, bias
    for adapter in output.active_adapters:
        if adapter not in output.lora_A:
            continue
        low, high = output.lora_A[adapter], output.lora_B[adapter]
        if adapter in output.lora_variant or high.bias is not None:
            return None
        weight = weight + (high.weight @ low.weight).to(weight.dtype) * output.scaling[adapter]
    return weight, bias


def _with_trained_tokens(
    output: Any, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The weight with the rows of the active adapters; as PEFT's forward, without the bias."""
    if output.merged:
        return None if output.disable_adapters else (weight, bias)
    if output.disable_adapters or not output.active_adapters:
        return weight, bias
    rows: torch.Tensor = output.get_merged_weights(output.active_adapters)
    return rows, None


_APPLIED: dict[tuple[str, str], Callable[..., tuple[torch.Tensor, torch.Tensor | None] | None]] = {
    ("peft.tuners.lora.layer", "Linear"): _with_lora,
    ("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer"): _with_trained_tokens,
}
