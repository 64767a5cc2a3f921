"""The weight of a head within PEFT's wrappers, where it is one weight: plain LoRA and trained tokens applied.

Letters: M model width, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from treewise.nn.decoder import has_hooks, plain_weight
from treewise.nn.lm_head import LowRank

if TYPE_CHECKING:  # what is read of PEFT's layers

    class AdaptedLayer(nn.Module):
        """Any of them."""

        merged: bool
        disable_adapters: bool
        active_adapters: Sequence[str]

    class LoraLayer(AdaptedLayer):
        """LoRA on a linear layer."""

        lora_A: Mapping[str, nn.Linear]
        lora_B: Mapping[str, nn.Linear]
        lora_variant: Mapping[str, object]
        scaling: Mapping[str, float]

    class TokensLayer(AdaptedLayer):
        """Trained rows of a table of tokens."""

        get_merged_weights: Callable[[Sequence[str]], torch.Tensor]


def active_module(output: nn.Module) -> nn.Module:
    """What a head within one of PEFT's wrappers runs: the copy that is trained whole (`modules_to_save`), the layer
    with trained tokens (`trainable_token_indices`), or the head itself."""
    if hasattr(output, "token_adapter"):
        return output.get_submodule("token_adapter")
    copies: nn.ModuleDict | None = getattr(output, "modules_to_save", None)
    if copies is None:
        return output
    active: Sequence[str] = getattr(output, "active_adapters", ())
    if getattr(output, "disable_adapters", False) or not active or active[0] not in copies:
        return output.get_submodule("original_module")
    return copies[active[0]]


def weight_with_adapters(output: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight ([V, M]) and bias ([V]) of a linear layer, plain LoRA or trained tokens applied; None where it is more."""
    apply = _APPLIED.get((type(output).__module__, type(output).__name__))
    if apply is None:
        return plain_weight(output)
    base = None if has_hooks(output) else weight_with_adapters(output.get_submodule("base_layer"))
    return None if base is None else apply(output, *base)


def trained_parts(output: nn.Module) -> tuple[LowRank, ...]:
    """The factors of plain LoRA on a weight that is not trained itself; none where the head is anything else."""
    if _APPLIED.get((type(output).__module__, type(output).__name__)) is not _with_lora or has_hooks(output):
        return ()
    layer: LoraLayer = output  # type: ignore[assignment]
    plain = plain_weight(output.get_submodule("base_layer"))
    if plain is None or plain[0].requires_grad or layer.merged or layer.disable_adapters:
        return ()
    found = _factors(layer) or ()
    return () if any(isinstance(each.low, DTensor) for each in found) else found


def _factors(output: "LoraLayer") -> tuple[LowRank, ...] | None:
    """Those of the active adapters; None for variants of LoRA, which add more."""
    found = []
    for adapter in output.active_adapters:
        if adapter not in output.lora_A:
            continue
        low, high = output.lora_A[adapter], output.lora_B[adapter]
        if adapter in output.lora_variant or getattr(high, "bias", None) is not None:
            return None
        found.append(LowRank(low.weight, high.weight, output.scaling[adapter]))
    return tuple(found)


def _with_lora(
    output: "LoraLayer", weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The weight with the active adapters, in the graph of both; None for variants of LoRA, which add more."""
    if output.merged:
        return None if output.disable_adapters else (weight, bias)  # its forward takes merged adapters out again
    if output.disable_adapters:
        return weight, bias
    factors = _factors(output)
    if factors is None:
        return None
    for each in factors:
        weight = weight + (each.high @ each.low).to(weight.dtype) * each.scaling
    return weight, bias


def _with_trained_tokens(
    output: "TokensLayer", weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The weight with the rows of the active adapters; as PEFT's forward, without the bias."""
    if output.merged:
        return None if output.disable_adapters else (weight, bias)
    if output.disable_adapters or not output.active_adapters:
        return weight, bias
    return output.get_merged_weights(output.active_adapters), None


_APPLIED: dict[tuple[str, str], Callable[..., tuple[torch.Tensor, torch.Tensor | None] | None]] = {
    ("peft.tuners.lora.layer", "Linear"): _with_lora,
    ("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer"): _with_trained_tokens,
}
