"""A transformers causal language model, split into the decoder (hidden rows) and the head (logits).

A model whose architecture cannot follow a tree is rejected by name, before any compute. What names and flags do not
show, `engine.probe` measures.

Letters: T tokens of a micro-batch, M model width, V vocabulary, E experts.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from treewise.base.features import feature
from treewise.errors import UnsupportedModelError
from treewise.nn.attention import AttentionName, TreeContext, carry, install, install_legacy_layers
from treewise.nn.lm_head import AnyHead, Head, LogitsSlot
from treewise.nn.module_head import ModuleHead
from treewise.nn.tensors import to_device

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Layers that mix no tokens.
TOKENWISE_LAYERS = {"moe", "mlp"}
# Names of layers with a recurrence or a convolution, alone or beside attention.
RECURRENT_LAYERS = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
# What only layers with a recurrence or a convolution have: names of parameters and buffers, and classes without such.
RECURRENT_PARAMETERS = {"A_log", "dt_bias", "time_decay", "recurrent_param", "slope_rate"}
RECURRENT_CLASSES = {"xLSTMLayer"}
# Adapters of PEFT whose result for a token is not a function of its path, and why.
_ROW_ADAPTERS = {
    "ALORA": "acts from the last alora_invocation_tokens of a row on, and a shared token is part of several rows",
    "LILY": "routes by a mean over all tokens of a row, of which a shared token has several",
    "POLY": "needs the task_ids of each row",
    "PVERA": "draws random numbers for each row",
    "SHADOW": "runs a second model beside the layers, which does not follow a tree",
    "XLORA": "mixes its adapters by a first pass over each row",
    "ADAPTION_PROMPT": "adds prompt tokens to the attention of its layers",
}
_WHOLE = (
    "has a decoder that is a whole language model with a head of its own, of which trees cannot take the decoder alone"
)
_QFORMER = "reads every text with an image, by a Q-Former that sees both"
# Families whose classes and configurations look like those that follow a tree, by `model_type`, and why they do not.
REFUSED_FAMILIES = {
    "blip-2": _WHOLE,
    "blt": "computes on patches of bytes, which another model cuts over a whole row",
    "doge": "adds a learned mask of its own to that of its attention, which a tree cannot replace",
    "gemma4_unified_assistant": "continues the hidden rows and keys of another model (shared_kv_states), not tokens",
    "git": "puts the image's tokens before the text and builds one mask for both, which a tree cannot replace",
    "idefics": "reads images by cross-attention in layers of its own, which need pixels in every forward",
    "instructblip": _QFORMER,
    "instructblipvideo": _QFORMER,
    "kosmos-2": _WHOLE,
    "kosmos-2.5": _WHOLE,
    "molmo2": "asks in its forward which tokens are images (mm_token_type_ids) on text alone, too, as a tree does not",
}
SUPPORTED_MODELS = "Supported models: docs/models.md."  # ends messages about a model


@dataclass(frozen=True, slots=True)
class DecoderAndHead:
    """The two halves of a causal language model.

    model: without torch.compile and DDP around it, with PEFT. base: without PEFT. decoder: token ids to hidden rows.
    output: the layer from hidden rows to logits; `scale` and `softcap` are what the model does to its result (see
    `lm_head.Head`). configs: those that the decoder's layers read their attention from. is_recurrent: whether layers
    carry states from token to token. forward_parameters: of the decoder (see `parameters_of`). logits: kept from a
    forward to its backward.
    """

    model: nn.Module
    base: PreTrainedModel
    decoder: PreTrainedModel
    output: nn.Module
    scale: float
    softcap: float | None
    configs: list[PreTrainedConfig]
    is_recurrent: bool
    forward_parameters: tuple[frozenset[str], bool]
    logits: LogitsSlot = field(default_factory=LogitsSlot, compare=False)

    @property
    def is_current(self) -> bool:
        """Whether the model still has the head and the attention that it had when it was split.

        A resized vocabulary or an adapter replaces the head; `set_attn_implementation` replaces the attention.
        """
        names = [each._attn_implementation for each in self.configs]
        return self.base.get_output_embeddings() is self.output and all(type(each) is AttentionName for each in names)

    @property
    def num_embeddings(self) -> int:
        """Tokens that have an embedding."""
        num_tokens: int = innermost(self.decoder.get_input_embeddings()).weight.shape[0]
        return num_tokens

    @property
    def num_logits(self) -> int:
        """Logits of a row.

        Raises:
            UnsupportedModelError: a head without a number of outputs.
        """
        layer = innermost(self.output)
        weight, num_tokens = getattr(layer, "weight", None), getattr(layer, "out_features", None)
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():
            return weight.shape[0]  # PEFT makes the copy of a tied head as a layer of `M` outputs, and merges it so
        if not isinstance(num_tokens, int):
            raise UnsupportedModelError(
                f"the head is a {type(self.output).__name__} without out_features, not a linear layer. "
                f"{SUPPORTED_MODELS}"
            )
        return num_tokens

    @property
    def device(self) -> torch.device:
        """Where token ids have to be."""
        embeddings = self.decoder.get_input_embeddings()
        first = next(embeddings.parameters(), None)  # `weight` of an adapter is computed; FSDP1 has no parameter there
        return (embeddings.weight if first is None else first).device

    def head(self, temperature: float = 1.0) -> AnyHead:
        """The head with its present weights, adapters included; `temperature` divides the logits."""
        layer = _active_module(self.output)
        if isinstance(getattr(layer, "weight", None), DTensor):
            shard = feature("tensor_parallel").vocabulary_shard(layer)
            if shard is not None:
                local, bias = layer.weight.to_local(), None if layer.bias is None else layer.bias.to_local()
                return Head(local, bias, self.scale, self.softcap, temperature, shard=shard, slot=self.logits)
        plain = None if _has_hooks(self.output) else _plain_weight(layer)
        if plain is None:
            return ModuleHead(self.output, self.num_logits, self.scale, self.softcap, temperature)
        return Head(*plain, self.scale, self.softcap, temperature, slot=self.logits)


def split_model(model: nn.Module) -> DecoderAndHead:
    """Finds decoder and head, rejects layers that cannot follow a tree, and installs treewise's attention.

    Raises:
        UnsupportedModelError: naming the model, layer or setting.
    """
    model, base = unwrap_model(model), base_model(model)
    name = type(base).__name__
    if isinstance(getattr(base, "pretrained_model", None), nn.Module) and hasattr(base, "v_head"):
        raise UnsupportedModelError(
            f"{name} has a value head, which trees do not compute; pass its pretrained_model. {SUPPORTED_MODELS}"
        )
    if not isinstance(base, PreTrainedModel):
        hint = " Load it first: AutoModelForCausalLM, of adapters peft.AutoPeftModelForCausalLM, .from_pretrained(...)."
        hint = "" if isinstance(base, nn.Module) else hint
        raise UnsupportedModelError(f"{name} is not a transformers model.{hint} {SUPPORTED_MODELS}")
    if base.config.model_type in REFUSED_FAMILIES:
        raise UnsupportedModelError(f"{name} {REFUSED_FAMILIES[base.config.model_type]}. {SUPPORTED_MODELS}")
    if getattr(base.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} has an encoder; only causal language models follow a tree. {SUPPORTED_MODELS}"
        )
    output = base.get_output_embeddings()
    if output is None:
        raise UnsupportedModelError(
            f"{name} has no language-model head (a classifier, a value head or a bare decoder?). {SUPPORTED_MODELS}"
        )
    decoder = _find_decoder(base)
    _refuse_layers(decoder, name)
    if not install_legacy_layers(decoder) and not decoder._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} does not use transformers' attention interface. {SUPPORTED_MODELS}")
    configs = _attention_configs(decoder)
    install(configs)
    is_recurrent = mixes_in_order(decoder)
    if is_recurrent:
        feature("recurrent").install(decoder)
    if any(isinstance(each, DTensor) for each in base.parameters()):
        feature("tensor_parallel").repair_tensor_parallel(base)
    scale, softcap = _logit_scale(base.config), _softcap(base.config)
    parameters = parameters_of(type(decoder))
    return DecoderAndHead(model, base, decoder, output, scale, softcap, configs, is_recurrent, parameters)


def mixes_in_order(decoder: nn.Module) -> bool:
    """Whether a part of the model carries state from token to token, or convolves over them."""
    for module in decoder.modules():
        own = {*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))}
        if isinstance(module, nn.Conv1d) or own & RECURRENT_PARAMETERS or type(module).__name__ in RECURRENT_CLASSES:
            return True
    return False


def run_decoder(
    lm: DecoderAndHead,
    token_ids: np.ndarray,
    depth: np.ndarray,
    context: TreeContext,
    *,
    with_router_logits: bool = False,
    inside: tuple[PreTrainedModel, dict[str, Any]] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Forward of one micro-batch: [T, M] hidden rows, and the router logits of each layer with a router ([T, E]).

    token_ids, depth: [T] integers. with_router_logits: without it the second result is empty. inside: a part of the
    model that calls the decoder, and further arguments of it (images).

    Raises:
        UnsupportedModelError: router logits of a model that returns none.
    """
    device = lm.device
    module, further = (lm.decoder, {}) if inside is None else inside
    names, takes_any = lm.forward_parameters if inside is None else parameters_of(type(module))
    arguments: dict[str, Any] = {"treewise": context} if takes_any else {}
    if "position_ids" in names:  # others have no attention, so no positions
        arguments["position_ids"] = to_device(depth, device, torch.long)[None]
    if "attention_mask" in names:
        arguments["attention_mask"] = context.empty_mask(device, lm.decoder.dtype)
    if with_router_logits:
        arguments["output_router_logits"] = True
    input_ids = to_device(token_ids, device, torch.long)[None]
    with _carried_input(lm) if context.carried.from_input else nullcontext():
        output = module(input_ids=input_ids, use_cache=False, **{**arguments, **further})
    context.is_done = True
    return output.last_hidden_state[0], _router_logits(lm, output) if with_router_logits else ()


@contextmanager
def _carried_input(lm: DecoderAndHead) -> Iterator[None]:
    """Inside, input rows require gradients: reentrant checkpoints and sharded layers look at nothing else."""
    embedding = lm.decoder.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _module, _inputs, rows: carry(rows)[0])
    try:
        yield
    finally:
        hook.remove()


def _router_logits(lm: DecoderAndHead, output: ModelOutput) -> tuple[torch.Tensor, ...]:
    layers = getattr(output, "router_logits", None) or ()
    logits = tuple(each.reshape(-1, each.shape[-1]) for each in layers if isinstance(each, torch.Tensor))
    if not logits:
        raise UnsupportedModelError(
            f"{type(lm.decoder).__name__} returns no router logits, so it has no loss on them; set "
            "output_router_logits=False."
        )
    return logits


def parameters_of(kind: Any) -> tuple[frozenset[str], bool]:
    """Names of a forward's parameters, and whether it takes keyword arguments that it does not name."""
    parameters = inspect.signature(kind.forward).parameters
    return frozenset(parameters), any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def unwrap_model(model: Any) -> Any:
    """The model inside torch.compile and DistributedDataParallel, with PEFT's adapters.

    Trees change shape at every step, and the engine calls the decoder, so neither wrapper would help.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in getattr(model, "_modules", ()):  # a torch.compile'd module holds the original there
            model = model.get_submodule("_orig_mod")
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Whether modules of a model are compiled in place."""
    return any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, compiled layers of a model run as they were written: rows of other kinds would be compiled, too."""
    with torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext():
        yield


def is_peft(model: nn.Module) -> bool:
    """Whether PEFT's adapters are around a model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_parameters(model: nn.Module) -> dict[int, float]:
    """Ids of parameters of modules within adapter layers, apart from the layers that these adapt; each with the largest
    factor of its layer's result (LoRA's alpha over rank; 1 where there is none)."""
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "adapter_layer_names")]
    adapted = {
        id(parameter)
        for layer in layers
        if isinstance(getattr(layer, "base_layer", None), nn.Module) and not hasattr(layer.base_layer, "base_layer")
        for parameter in layer.base_layer.parameters()
    }
    factors = [max(map(abs, dict(getattr(layer, "scaling", {})).values()), default=1.0) for layer in layers]
    found = {
        id(each): factor
        for layer, factor in zip(layers, factors, strict=True)
        for each in layer.parameters()
        if each.is_floating_point()
    }
    return {key: factor for key, factor in found.items() if key not in adapted}


# On parameters of adapters: of their own size; where that is zero, by the factor of their layer: at LoRA's 32 of rank 1
# more makes a tiny model a function of the adapter alone, which rounding moves by 1e-3.
_NOISE = 0.05


def stirred(data: torch.Tensor, seed: int, factor: float) -> torch.Tensor:
    """A parameter of an adapter with noise: a fresh adapter is the identity, which hides faults. factor: of its layer's
    result (`adapter_parameters`)."""
    if isinstance(data, DTensor):  # parts of an adapter may have any noise; whole ones have the same on all ranks
        part = stirred(data.to_local(), seed, factor)
        mesh, places = data.device_mesh, data.placements
        return DTensor.from_local(part, mesh, places, run_check=False, shape=data.shape, stride=data.stride())
    generator = torch.Generator(data.device).manual_seed(seed)
    noise = torch.randn(data.shape, generator=generator, device=data.device, dtype=torch.float32)
    size = data.float().square().mean().sqrt().nan_to_num()
    return (data.float() + noise * torch.where(size > 0, _NOISE * size, _NOISE / max(factor, 1.0))).to(data.dtype)


@torch.no_grad()
def stir_adapters(model: nn.Module) -> None:
    """Adds noise to the adapters of a model, in place."""
    factors = adapter_parameters(model)
    trained = [each for each in model.parameters() if each.requires_grad and id(each) in factors]
    for seed, parameter in enumerate(trained):
        parameter.copy_(stirred(parameter.detach(), seed, factors[id(parameter)]))


def base_model(model: Any) -> nn.Module:
    """The transformers model inside torch.compile, DistributedDataParallel and PEFT.

    Raises:
        UnsupportedModelError: an adapter that learns a prompt, whose result for a token depends on its whole row, or
            that is to be tied to another.
    """
    model = unwrap_model(model)
    if not is_peft(model):
        return model
    for adapter, config in model.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"adapter {adapter!r} learns a prompt ({config.peft_type}), which changes every depth; use LoRA."
            )
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "alora_invocation_tokens", None) is not None:
            kind = "ALORA"
        if kind in _ROW_ADAPTERS:
            raise UnsupportedModelError(f"adapter {adapter!r} ({kind}) {_ROW_ADAPTERS[kind]}; use LoRA.")
        if getattr(config, "target_modules_to_tie", None):  # PEFT's note of what ensure_weight_tying means
            raise UnsupportedModelError(
                f"adapter {adapter!r} is to be tied between the embeddings and the head (ensure_weight_tying), and "
                "PEFT ties such adapters only until the model is moved or saved. Name embed_tokens in modules_to_save "
                "in place of target_modules, which it ties for good, or leave ensure_weight_tying out."
            )
    return model.get_base_model()


def _find_decoder(base: PreTrainedModel) -> PreTrainedModel:
    decoder = base.get_decoder()
    if decoder is None or decoder is base:
        # Llama 4's text model returns itself; then it is the one transformers model among the children.
        inner = [child for child in base.children() if isinstance(child, PreTrainedModel)]
        if len(inner) != 1:
            raise UnsupportedModelError(
                f"{type(base).__name__} has no get_decoder() that returns its decoder. {SUPPORTED_MODELS}"
            )
        decoder = inner[0]
    if not isinstance(decoder, PreTrainedModel):  # some call their head a decoder (ModernBERT)
        decoder = base.base_model
    return decoder


def _refuse_layers(decoder: PreTrainedModel, name: str) -> None:
    config = decoder.config
    recurrent = feature("recurrent") if mixes_in_order(decoder) else None
    has_mixers = recurrent is not None and bool(recurrent.kinds_of(decoder))
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in ATTENTION_LAYERS | TOKENWISE_LAYERS and not (kind in RECURRENT_LAYERS and has_mixers):
            raise UnsupportedModelError(
                f"{name} layer {index} is a {kind!r} layer, which cannot follow a tree yet. {SUPPORTED_MODELS}"
            )
    if recurrent is not None:
        recurrent.refuse_unknown(decoder, name)
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise UnsupportedModelError(
            f"{name} uses ALiBi, whose bias depends on a token's index in memory. {SUPPORTED_MODELS}"
        )
    if not has_mixers and "position_ids" not in parameters_of(type(decoder))[0]:
        raise UnsupportedModelError(
            f"{name} takes no position_ids, which trees need for their depths. {SUPPORTED_MODELS}"
        )


def _attention_configs(decoder: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations that the decoder's layers read their attention implementation from."""
    configs = {id(decoder.config): decoder.config}
    for module in decoder.modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return list(configs.values())


# Names of the factor of the logits in configurations; `engine.probe` detects a missing or wrong one.
_MULTIPLIES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVIDES = ("logits_scaling",)
_LOGITS_SCALING_MULTIPLIES = {"hyperclovax"}  # `logits_scaling` is a factor there, a divisor elsewhere
_UNSCALED = {"aya_vision", "cohere2_vision"}  # without the scale of their language model
_UNCAPPED = {"gemma3"}  # Gemma3ForConditionalGeneration: without the cap of its language model
_SOFTCAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")


def _logit_scale(config: PreTrainedConfig) -> float:
    """Factor of the logits: Cohere multiplies, Granite divides, Falcon-H1 multiplies."""
    if config.model_type in _UNSCALED:
        return 1.0
    config = config.get_text_config()
    scale = 1.0
    for attribute in (*_MULTIPLIES, *_DIVIDES):
        factor = getattr(config, attribute, None) or 1.0
        divides = attribute in _DIVIDES and config.model_type not in _LOGITS_SCALING_MULTIPLIES
        scale = scale / factor if divides else scale * factor
    return scale


def _softcap(config: PreTrainedConfig) -> float | None:
    if config.model_type in _UNCAPPED:
        return None
    config = config.get_text_config()
    return next((cap for name in _SOFTCAPS if (cap := getattr(config, name, None)) is not None), None)


def innermost(module: Any) -> Any:
    """The model's own layer below PEFT's adapters and wrappers. One with trained tokens makes a whole table at each
    look at its `weight`."""
    while True:
        below = getattr(module, "original_module", None)  # modules_to_save, trainable_token_indices
        if below is None and hasattr(module, "get_base_layer"):
            below = module.get_base_layer()
        if below is None or below is module:
            return module
        module = below


def _active_module(output: Any) -> Any:
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


def _plain_weight(output: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight ([V, M]) and bias ([V]) of a linear layer, plain LoRA or trained tokens applied; None where it is more."""
    kind = type(output)
    apply = _APPLIED.get((kind.__module__, kind.__name__))
    if apply is not None:
        base = None if _has_hooks(output) else _plain_weight(output.base_layer)
        return None if base is None else apply(output, *base)
    is_linear = isinstance(output, nn.Linear) and kind.forward is nn.Linear.forward
    if not is_linear or _has_hooks(output) or not output.weight.is_floating_point():
        return None
    return output.weight, output.bias


def _has_hooks(module: nn.Module) -> bool:
    """Whether something may change what the module's own class computes."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


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
