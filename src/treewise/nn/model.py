"""What treewise needs to know of a transformers model: its decoder, its head, and whether it can follow a tree.

A model that cannot is refused by name before any compute. What names and flags do not tell, `probe` finds out.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from treewise.errors import DataError, UnsupportedModelError
from treewise.nn import recurrent
from treewise.nn.attention import TreeContext, has_legacy_layers, install, install_legacy_layers, is_installed
from treewise.nn.device import to_device
from treewise.nn.lm_head import Head
from treewise.tree.forest import Forest

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Layers that mix no tokens.
TOKENWISE_LAYERS = {"moe", "mlp"}
# What configurations call layers with a recurrence or a convolution, alone or beside attention.
RECURRENT_LAYERS = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
_HELP = "Supported models: docs/models.md."


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A causal language model taken apart: `decoder` gives hidden rows, `head()` the projection to logits."""

    model: nn.Module
    decoder: PreTrainedModel
    output: nn.Module
    scale: float
    softcap: float | None

    def head(self, temperature: float = 1.0) -> Head:
        """The head as it is now (adapters included)."""
        weight, bias = _effective_weight(self.output)
        return Head(weight, bias, self.scale, self.softcap, temperature)

    @property
    def device(self) -> torch.device:
        return self.decoder.get_input_embeddings().weight.device


def take_apart(model: nn.Module) -> ModelParts:
    """Finds decoder and head, refuses what cannot follow a tree, and installs the attention.

    Raises:
        UnsupportedModelError: naming the model, layer or setting.
    """
    model, base = _unwrapped(model), base_model(model)
    name = type(base).__name__
    if isinstance(getattr(base, "pretrained_model", None), nn.Module) and hasattr(base, "v_head"):
        raise UnsupportedModelError(
            f"{name} has a value head, which trees do not compute; pass its pretrained_model. {_HELP}"
        )
    if not isinstance(base, PreTrainedModel):
        raise UnsupportedModelError(f"{name} is not a transformers model. {_HELP}")
    if getattr(base.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} has an encoder; only causal language models follow a tree. {_HELP}")
    output = base.get_output_embeddings()
    if output is None:
        raise UnsupportedModelError(
            f"{name} has no language-model head (a classifier, a value head or a bare decoder?). {_HELP}"
        )
    decoder = _find_decoder(base)
    _refuse_layers(decoder, name)
    install(_attention_configs(decoder))
    install_legacy_layers(decoder)
    recurrent.install(decoder)
    return ModelParts(model, decoder, output, _logit_scale(base.config), _softcap(base.config))


def is_current(parts: ModelParts) -> bool:
    """Whether a model is still put together as it was when it was taken apart.

    Its head may have been replaced since (a resized vocabulary, adapters put around it), or its attention.
    """
    base: Any = base_model(parts.model)
    return base.get_output_embeddings() is parts.output and is_installed(_attention_configs(parts.decoder))


def refuse_dropout(model: nn.Module) -> None:
    """Raises if any dropout, layer drop or router noise is active: a shared token is computed once, so branches cannot
    differ.

    Raises:
        UnsupportedModelError: naming the first active one.
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UnsupportedModelError(
                f"{name or 'model'} drops out (p={module.p}); set it to 0 or call model.eval()."
            )
        for attribute, value in vars(module).items():
            is_noise = "dropout" in attribute or attribute.endswith(("pdrop", "layerdrop", "jitter_noise"))
            if is_noise and isinstance(value, float) and value > 0:
                raise UnsupportedModelError(
                    f"{name or 'model'}.{attribute} is {value} while training; set it to 0 or call model.eval()."
                )


def refuse_tokens(parts: ModelParts, forest: Forest) -> None:
    """Raises `DataError` if a token of the tree has no embedding or no logit."""
    limit = _vocabulary(parts)
    largest = int(forest.token_ids.max())
    if largest >= limit:
        position = int(forest.token_ids.argmax())
        raise DataError(
            f"token id {largest} at tree position {position} (depth {forest.depth[position]}) is beyond the "
            f"model's {limit} embeddings; was the data tokenised for another model?"
        )


def refuse_candidates(parts: ModelParts, token_ids: np.ndarray) -> None:
    """Raises `DataError` if a token that a teacher names has no logit."""
    limit, largest = _vocabulary(parts), int(token_ids.max())
    if largest >= limit:
        raise DataError(
            f"teacher_ids hold token {largest}, which is beyond the model's {limit} tokens; a teacher with another "
            "vocabulary needs its candidates translated."
        )


def _vocabulary(parts: ModelParts) -> int:
    """Tokens that have both an embedding and a logit."""
    rows: int = parts.decoder.get_input_embeddings().weight.shape[0]
    return min(rows, getattr(parts.output, "out_features", rows))


_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")


def refuse_placeholders(parts: ModelParts, token_ids: np.ndarray) -> None:
    """Raises if tokens stand for pictures, videos or sounds, which trees do not compute: rows are text alone.

    Raises:
        UnsupportedModelError: with the token and its place.
    """
    config: Any = base_model(parts.model).config
    for name in _PLACEHOLDERS if config.get_text_config() is not config else ():
        token = getattr(config, name, None)
        found = np.flatnonzero(token_ids == token) if isinstance(token, int) else np.zeros(0)
        if len(found) > 0:
            raise UnsupportedModelError(
                f"tree position {found[0]} holds token {token}, the {name} of {type(parts.model).__name__}; rows with "
                f"images, videos or sounds are not supported, text alone is. {_HELP}"
            )


def refuse_lengths(parts: ModelParts, length: int) -> None:
    """Raises if rotary frequencies depend on how long a sequence is, and the longest path (`length`) is long enough.

    A shared token would need other frequencies for every trajectory (`dynamic`, `longrope`).

    Raises:
        UnsupportedModelError: with the length up to which the model can be trained on trees.
    """
    for module in parts.decoder.modules():
        kinds = getattr(module, "rope_type", None)
        if not isinstance(kinds, str | dict):
            continue
        all_rules: Any = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind != "longrope" and "dynamic" not in kind:
                continue
            rules = all_rules if layer is None else all_rules.get(layer, {})
            fixed: Any = getattr(module, "original_max_seq_len", None)
            limit = rules.get("original_max_position_embeddings") if kind == "longrope" else fixed and fixed - 1
            if limit is not None and length > limit:
                raise UnsupportedModelError(
                    f"the longest path has {length} tokens, but from {limit + 1} on the {kind!r} position encoding of "
                    f"{type(parts.decoder).__name__} depends on the length of a sequence, which shared tokens do not "
                    "have. Shorten the trajectories, or fix the encoding's factor in the configuration."
                )


def decoder_rows(parts: ModelParts, token_ids: np.ndarray, depth: np.ndarray, context: TreeContext) -> torch.Tensor:
    """[T, M] hidden rows of one micro-batch."""
    device = parts.device
    arguments: dict[str, Any] = {"treewise": context} if takes_any_argument(parts.decoder) else {}
    if "position_ids" in _parameters_of(type(parts.decoder)):  # others have no attention, so no positions
        arguments["position_ids"] = to_device(depth, device, torch.long)[None]
    if "attention_mask" in _parameters_of(type(parts.decoder)):
        arguments["attention_mask"] = context.empty_mask(device, parts.decoder.dtype)
    if context.wants_router_logits:
        arguments["output_router_logits"] = True
    input_ids = to_device(token_ids, device, torch.long)[None]
    output = parts.decoder(input_ids=input_ids, use_cache=False, **arguments)
    context.is_done = True
    if context.wants_router_logits:
        context.router_logits = _router_logits(parts, output)
    return output.last_hidden_state[0]


def _router_logits(parts: ModelParts, output: Any) -> tuple[torch.Tensor, ...]:
    """The router logits of every layer that has a router, [T, E] each."""
    given = getattr(output, "router_logits", None)
    found = tuple(each.reshape(-1, each.shape[-1]) for each in given or () if isinstance(each, torch.Tensor))
    if not found:
        raise UnsupportedModelError(
            f"{type(parts.decoder).__name__} gives no router logits, so it has no loss on them; set "
            "output_router_logits=False."
        )
    return found


def _parameters_of(kind: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(kind.forward).parameters)


def takes_any_argument(module: nn.Module) -> bool:
    """Whether a module's forward takes keyword arguments that it does not name."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in _parameters_of(type(module)).values())


def _unwrapped(model: Any) -> Any:
    """The model inside torch.compile and DistributedDataParallel: trees change shape at every step."""
    while isinstance(model, nn.parallel.DistributedDataParallel | torch._dynamo.OptimizedModule):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    return model


def base_model(model: Any) -> nn.Module:
    """The transformers model inside torch.compile, PEFT and wrappers.

    Raises:
        UnsupportedModelError: an adapter that learns a prompt.
    """
    model = _unwrapped(model)
    peft_config = getattr(model, "peft_config", None)
    if peft_config is not None and hasattr(model, "get_base_model"):
        for adapter, config in peft_config.items():
            if getattr(config, "is_prompt_learning", False):
                raise UnsupportedModelError(
                    f"adapter {adapter!r} learns a prompt ({config.peft_type}), which changes every depth; use LoRA."
                )
        return model.get_base_model()
    return model


def _find_decoder(base: PreTrainedModel) -> PreTrainedModel:
    decoder = base.get_decoder()
    if decoder is None or decoder is base:
        # Some models (Llama 4's text model) do not say; then it is the one transformers model among the children.
        inner = [child for child in base.children() if isinstance(child, PreTrainedModel)]
        if len(inner) != 1:
            raise UnsupportedModelError(f"{type(base).__name__} does not say which part is its decoder. {_HELP}")
        decoder = inner[0]
    if not isinstance(decoder, PreTrainedModel):  # some call their head a decoder (ModernBERT)
        decoder = base.base_model
    return decoder


def _refuse_layers(decoder: PreTrainedModel, name: str) -> None:
    config = decoder.config
    has_mixers = bool(recurrent.kinds_of(decoder))
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in ATTENTION_LAYERS | TOKENWISE_LAYERS and not (kind in RECURRENT_LAYERS and has_mixers):
            raise UnsupportedModelError(
                f"{name} layer {index} is a {kind!r} layer, which cannot follow a tree yet. {_HELP}"
            )
    recurrent.refuse_unknown(decoder, name)
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise UnsupportedModelError(f"{name} uses ALiBi, whose bias depends on the place in memory. {_HELP}")
    if not has_mixers and "position_ids" not in _parameters_of(type(decoder)):
        raise UnsupportedModelError(f"{name} takes no position_ids, so it cannot be told depths. {_HELP}")
    if not decoder._can_set_attn_implementation() and not has_legacy_layers(decoder):
        raise UnsupportedModelError(f"{name} does not use transformers' attention interface. {_HELP}")


def _attention_configs(decoder: PreTrainedModel) -> list[Any]:
    """The configurations that the decoder's layers read their attention implementation from."""
    found = {id(decoder.config): decoder.config}
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


# What configurations call the factor of their logits; `probe` finds out where one is wrong or missing.
_MULTIPLIES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVIDES = ("logits_scaling",)
_MULTIPLIES_ALL_THE_SAME = {"hyperclovax"}  # it calls a factor what others call a divisor
_UNSCALED = {"aya_vision", "cohere2_vision"}  # they leave out the scale that their language model has
_SOFTCAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")


def _logit_scale(config: Any) -> float:
    """Factor of the logits: Cohere multiplies, Granite divides, Falcon-H1 multiplies."""
    if config.model_type in _UNSCALED:
        return 1.0
    config = config.get_text_config()
    scale = 1.0
    for attribute in (*_MULTIPLIES, *_DIVIDES):
        factor = getattr(config, attribute, None) or 1.0
        divides = attribute in _DIVIDES and config.model_type not in _MULTIPLIES_ALL_THE_SAME
        scale = scale / factor if divides else scale * factor
    return scale


def _softcap(config: Any) -> float | None:
    config = config.get_text_config()
    return next((cap for name in _SOFTCAPS if (cap := getattr(config, name, None)) is not None), None)


def _effective_weight(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of the head, with what PEFT puts around it."""
    if hasattr(output, "modules_to_save") and hasattr(output, "active_adapter"):
        active = output.active_adapter
        name = active[0] if isinstance(active, list) else active
        disabled = getattr(output, "disable_adapters", False)
        output = output.original_module if disabled else output.modules_to_save[name]
    if hasattr(output, "lora_A") and hasattr(output, "base_layer"):
        return _lora_weight(output), output.base_layer.bias
    weight = getattr(output, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise UnsupportedModelError(
            f"the head is a {type(output).__name__}, not a linear layer in a floating-point type. {_HELP}"
        )
    return output.weight, getattr(output, "bias", None)


def _lora_weight(output: Any) -> torch.Tensor:
    weight = output.base_layer.weight
    if output.disable_adapters or output.merged:
        return weight
    for adapter in output.active_adapters:
        if adapter not in output.lora_A:
            continue
        if getattr(output, "use_dora", {}).get(adapter, False):
            raise UnsupportedModelError("DoRA on the language-model head is not supported; exclude lm_head from it.")
        delta = output.lora_B[adapter].weight @ output.lora_A[adapter].weight
        weight = weight + delta.to(weight.dtype) * output.scaling[adapter]
    return weight


@contextmanager
def sparse_embedding_gradients(parts: ModelParts) -> Iterator[None]:
    """On a CPU: the input embedding's gradient touches the rows of a micro-batch, not the whole vocabulary.

    `.grad` stays dense. Embeddings of another kind (adapters, shards, hooks on the gradient) are left alone.
    """
    module = parts.decoder.get_input_embeddings()
    weight = module.weight
    is_plain = isinstance(module, nn.Embedding) and type(weight) is nn.Parameter and weight.device.type == "cpu"
    if not is_plain or module.sparse or not weight.requires_grad or _has_hooks(weight):
        yield
        return
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    module.sparse = True
    try:
        yield
    finally:
        module.sparse = False


def _has_hooks(weight: torch.Tensor) -> bool:
    """Whether somebody reads, or takes away, the gradient as it comes in."""
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))
