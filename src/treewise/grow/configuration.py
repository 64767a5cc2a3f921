"""The configuration of a grown model.

Head size, vocabulary, positions and rotary tables stay; hidden size, inner sizes and the numbers of heads grow by one
whole factor, so that a wider model repeats each unit of the smaller one equally often and norms keep their mean square.
"""

import copy
from dataclasses import dataclass
from typing import Any

from treewise.errors import ConfigError, UnsupportedModelError

# Families whose growth is tested to keep the function (tests/grow/test_families.py).
FAMILIES = (
    "gemma3_text",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)
WIDTH_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "ffn_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "word_embed_proj_dim",
)
EXPERT_FIELDS = ("num_local_experts", "num_experts")
# Numbers that scale activations: they would have to change with the width, each family in its own way.
MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logit_scale",
    "logits_scaling",
    "residual_multiplier",
    "scale_depth",
    "scale_emb",
)
LATENT_FIELDS = ("kv_lora_rank", "q_lora_rank")
LAYER_LISTS = ("layer_types", "no_rope_layers")  # one entry a layer


@dataclass(frozen=True, slots=True)
class Target:
    """How much larger the grown model is.

    Attributes:
        width: whole factor of hidden size, inner sizes and numbers of heads.
        num_layers: layers of the grown model, at least those of the small one; None: as many.
        experts: whole factor of the number of experts and of experts per token (mixtures only).
    """

    width: int = 1
    num_layers: int | None = None
    experts: int = 1


def refuse_configuration(config: Any, target: Target) -> None:
    """Checks that a model can be grown by the rules of this package.

    Raises:
        UnsupportedModelError: a family or a field (named) that no rule covers.
        ConfigError: a target that is no growth, or names experts where there are none.
    """
    family = config.model_type
    if family not in FAMILIES:
        raise UnsupportedModelError(f"{family} cannot be grown yet; families with tested rules: {', '.join(FAMILIES)}.")
    for name in MULTIPLIERS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"{family} has {name}={getattr(config, name)}, a multiplier that no growth rule covers."
            )
    for name in LATENT_FIELDS:
        if getattr(config, name, None):
            raise UnsupportedModelError(
                f"{family} has {name}={getattr(config, name)}: latent attention (MLA) cannot be grown."
            )
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(f"{family}: quantised weights cannot be grown; load and save dense weights first.")
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise UnsupportedModelError(f"{family}: word_embed_proj_dim differs from hidden_size; no rule covers that.")
    _refuse_target(config, target)


def _refuse_target(config: Any, target: Target) -> None:
    if target.width < 1 or target.experts < 1:
        raise ConfigError(f"width is {target.width}, experts is {target.experts}; give whole factors of at least 1.")
    layers = config.num_hidden_layers if target.num_layers is None else target.num_layers
    if layers < config.num_hidden_layers:
        raise ConfigError(f"layers is {layers}, fewer than the {config.num_hidden_layers} of the model; growing adds.")
    if target.experts > 1 and _num_experts(config) is None:
        raise ConfigError(f"experts is {target.experts}, but {config.model_type} has no experts; leave it out.")
    if target.width == target.experts == 1 and layers == config.num_hidden_layers:
        raise ConfigError("nothing grows: give --width, --layers or --experts beyond what the model has.")


def grown_configuration(config: Any, target: Target, layer_sources: list[int]) -> Any:
    """The configuration of the larger model.

    Parameters:
        config: the small model's configuration.
        target: how much larger.
        layer_sources: for each new layer the layer that it comes from (`layer_map.layer_sources`).
    """
    grown = copy.deepcopy(config)
    if getattr(config, "head_dim", None) is None and "head_dim" in config.to_dict():
        grown.head_dim = config.hidden_size // config.num_attention_heads
    for name in WIDTH_FIELDS:
        if isinstance(getattr(config, name, None), int) and _is_own_field(config, name):
            setattr(grown, name, getattr(config, name) * target.width)
    grown.num_hidden_layers = len(layer_sources)
    for name in LAYER_LISTS:
        values = getattr(config, name, None)
        if isinstance(values, list | tuple):
            setattr(grown, name, [values[source] for source in layer_sources])
    dense_layers = getattr(config, "mlp_only_layers", None)
    if dense_layers:
        grown.mlp_only_layers = [layer for layer, source in enumerate(layer_sources) if source in dense_layers]
    if target.experts > 1:
        for name in (*EXPERT_FIELDS, "num_experts_per_tok"):
            if isinstance(getattr(config, name, None), int) and _is_own_field(config, name):
                setattr(grown, name, getattr(config, name) * target.experts)
    return grown


def _is_own_field(config: Any, name: str) -> bool:
    """Not an alias of another field, which would be multiplied twice."""
    return name not in getattr(config, "attribute_map", {})


def _num_experts(config: Any) -> int | None:
    for name in EXPERT_FIELDS:
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    return None
