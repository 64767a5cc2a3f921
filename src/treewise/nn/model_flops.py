"""The costs of a model (`flops.FlopModel`), read from the shapes of its parameters and its configuration."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from treewise.base import features
from treewise.nn.flops import FlopModel, LayerReach
from treewise.nn.wrapped import base_model, named_modules, weight_of

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "top_k_experts")
# `hybrid` layers attend beside a recurrent function.
ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "hybrid")
# How often a layer attends in one forward, where that is not once.
CALLS_PER_LAYER = {"diffllama": 2}
# Values that a tower keeps for the backward, per input and output of a linear layer: residuals and norms too.
ACTIVATIONS_PER_LINEAR = 1.15
# What a norm keeps: its input and its output.
VALUES_PER_NORM = 2


def flop_model(model: nn.Module) -> FlopModel:
    """The costs of a transformers causal LM, read from the shapes of its parameters; `meta` tensors will do.

    In a model that sees, `vision` holds what its tower costs for an image.
    """
    base = base_model(model)
    config = base.config.get_text_config()
    decoder = base if config is base.config else base.get_decoder()
    per_token = {id(each) for each in decoder.parameters()}
    head: nn.Module | None = base.get_output_embeddings()
    head_modules = set(head.modules()) if head is not None else set()
    # Of a layer, and how many of them a token visits; 1 and 1 in a dense model.
    num_experts = int(next((getattr(config, each) for each in EXPERT_COUNTS if getattr(config, each, None)), 1))
    visits = (getattr(config, each) for each in EXPERTS_PER_TOKEN if getattr(config, each, None))
    num_visited = int(next(visits, num_experts))
    linear = backward = 0.0
    activations = 0.0
    for module, name, parameter in _matrices(model):
        if isinstance(module, nn.Embedding) or module in head_modules or id(parameter) not in per_token:
            continue
        is_expert = parameter.ndim == 3 and parameter.shape[0] == num_experts and not isinstance(module, nn.Conv1d)
        part = num_visited / num_experts if is_expert or ".experts." in name else 1.0
        flops = 2.0 * parameter.numel() * part
        linear += flops
        backward += flops * (2 if parameter.requires_grad else 1)
        activations += (num_visited if is_expert else part) * sum(parameter.shape[-2:])
    norms = sum(_norm_width(module, name, config) for name, module in named_modules(decoder))
    head_weight = None if head is None else weight_of(head)
    head_flops = 0.0 if head_weight is None else 2.0 * head_weight.numel()
    is_head_trained = head_weight is not None and head_weight.requires_grad
    pairs: Counter[LayerReach] = Counter()
    for reach in _layer_reaches(config):
        heads, _, key_size, value_size = head_sizes(config)
        pairs[reach] += 2 * heads * (key_size + value_size)
    embedding = weight_of(base.get_input_embeddings())
    return FlopModel(
        linear=linear,
        linear_backward=backward,
        head=head_flops,
        head_backward=head_flops * (2 if is_head_trained else 1),
        pair_forward=tuple(pairs.items()),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_trained_parameters=sum(each.numel() for each in model.parameters() if each.requires_grad),
        gateway_values=gateway_values(config),
        activation_values=round(activations) + VALUES_PER_NORM * norms,
        vision=None if config is base.config else features.images.vision_costs(base, ACTIVATIONS_PER_LINEAR),
        vocabulary=embedding.shape[0],
        hidden_values=getattr(config, "hidden_size", embedding.shape[1]),
    )


def flop_model_of_config(config: PreTrainedConfig) -> FlopModel:
    """The costs of a model known by its transformers configuration alone; no weights are made or read."""
    with torch.device("meta"):
        return flop_model(auto_class(config).from_config(config, trust_remote_code=False))


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes a model of this configuration: of text, or of images and text.

    Of families that have both (Qwen3.5), the one that the checkpoint was saved with.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    is_text = config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    sees = with_images is not None and (not is_text or with_images in (config.architectures or ()))
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def gateway_values(config: PreTrainedConfig) -> int:
    """Keys and values (numbers) of one gateway token over all layers, as attention receives them; 0 without attention.

    config: a transformers configuration. Hybrid models count their attention layers, latent attention its full heads.
    """
    values = 0
    for reach in _layer_reaches(config):
        _, key_heads, key_size, value_size = head_sizes(config)
        # Sliding layers of MiMo have twice the key heads.
        factor = 2 if config.model_type == "mimo_v2_flash" and reach.window is not None else 1
        values += factor * key_heads * (key_size + value_size)
    return values


# -- shapes of a model ------------------------------------------------------------------------------------------------


def _matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters that multiply activations, each once."""
    seen: set[int] = set()
    for module_name, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2 and "bias" not in name and id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, f"{module_name}.{name}", parameter


def _norm_width(module: nn.Module, name: str, config: PreTrainedConfig) -> int:
    """Values per token that a norm of the decoder takes in; 0 for other modules. One of queries or keys takes every
    head."""
    weight = getattr(module, "weight", None) if "norm" in type(module).__name__.lower() else None
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return 0
    heads, key_heads, key_size, _ = head_sizes(config) if getattr(config, "num_attention_heads", None) else (1, 1, 0, 0)
    is_per_head = weight.shape[0] == key_size and weight.shape[0] != config.hidden_size
    part = name.rpartition(".")[2].lower()
    count = heads if is_per_head and part.startswith("q") else key_heads if is_per_head else 1
    return count * weight.shape[0]


def head_sizes(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Query heads, key-value heads, size of keys, size of values, as attention receives them."""
    heads = config.num_attention_heads
    if getattr(config, "qk_nope_head_dim", None):
        return heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    is_repeated = config.model_type == "jetmoe"  # keys and values are repeated for the experts of the queries
    key_heads = heads if is_repeated else getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, size, getattr(config, "v_head_dim", None) or size


def _layer_reaches(config: PreTrainedConfig) -> list[LayerReach]:
    """One for each call of attention in a forward; none for models without attention."""
    if getattr(config, "num_attention_heads", None) is None:
        return []
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and config.model_type == "dory":  # its middle layers run in a loop
        kinds = kinds + kinds[config.n_input_layers :][: config.n_recurrent_layers] * (config.n_recurrent_loops - 1)
    if kinds is None:
        uses_window = getattr(config, "use_sliding_window", True)
        window = getattr(config, "sliding_window", None) if uses_window else None
        num_layers = getattr(config, "decoder_layers", None) or config.num_hidden_layers
        return [LayerReach(window=window)] * num_layers * CALLS_PER_LAYER.get(config.model_type, 1)
    reach = {
        "full_attention": LayerReach(),
        "sliding_attention": LayerReach(window=getattr(config, "sliding_window", None)),
        "chunked_attention": LayerReach(chunk=getattr(config, "attention_chunk_size", None)),
        "hybrid": LayerReach(),
    }
    return [reach[kind] for kind in kinds if kind in ATTENTION_KINDS]
