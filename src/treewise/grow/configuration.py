"""The configuration of a grown model, and from which layer each of its layers comes.

Head size, vocabulary, positions and rotary tables stay; hidden size and the numbers of heads grow by one whole factor,
so that a wider model repeats each unit of the smaller one equally often and norms keep their mean square; inner sizes
grow by it, too, or by a whole factor of their own.

Depth: `zero`: each layer is followed by copies of itself whose results are multiplied by zero, so the function is kept
and the copies learn from the first step on. `stack`: the whole stack again (StackBERT, Gong et al., 2019), which keeps
no function.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Lt

from treewise.errors import ConfigError, UnsupportedModelError, check_choice, check_fields
from treewise.tree import Forest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MANGO = "mango"
OPERATORS = ("copy", "stack", MANGO)
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
WIDTH_FIELDS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "word_embed_proj_dim")
INNER_FIELDS = ("intermediate_size", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size")
EXPERT_FIELDS = ("num_local_experts", "num_experts")
LAYER_LISTS = ("layer_types", "no_rope_layers")  # one entry a layer
# Fields of a wanted configuration that say nothing of the sizes and rules of its layers.
NOT_COMPARED = ("architectures", "dtype", "transformers_version", "use_cache", "_name_or_path", "decoder_sparse_step")


@dataclass(frozen=True, slots=True)
class Growth:
    """What `grow` makes.

    Attributes:
        width: whole factor of hidden size, heads and key heads.
        inner: whole factor of the inner sizes of MLPs and experts; None: `width`.
        num_layers: layers of the grown model; None: as many as the small one has.
        experts: whole factor of experts and of experts per token (mixtures only).
        like: configuration of the wanted model, in place of width, inner, num_layers and experts.
        operator: `copy`, `stack`, or `mango`.
        noise: breaks the symmetry between copies, in standard deviations of each matrix; sums over copies keep their
            value.
        seed: of the noise and of mango.
        check: compare logits of both models (both are loaded in float32).
        forests: the trees that mango is fitted to, in turn.
        rank: of mango's tensor ring. steps: of its optimizer; the paper takes 100. learning_rate: of
            Adam, on the maps. trees_per_step: trees of one step. max_tokens: budget of a micro-batch, or None: whole
            trees.

    Raises:
        ConfigError: a choice that is unknown, or a number out of range.
    """

    width: int = 1
    inner: int | None = None
    num_layers: int | None = None
    experts: int = 1
    like: "PreTrainedConfig | None" = None
    operator: str = "copy"
    noise: Annotated[float, Ge(0), Lt(math.inf)] = 0.01
    seed: int = 0
    check: bool = True
    forests: Sequence[Forest] = ()
    rank: Annotated[int, Ge(1)] = 1
    steps: Annotated[int, Ge(1)] = 100
    learning_rate: float = 1e-3
    trees_per_step: int = 1
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_choice("operator", self.operator, OPERATORS)
        for name in ("width", "experts", "inner"):
            factor = getattr(self, name)
            if factor is not None and (not isinstance(factor, int) or factor < 1):
                raise ConfigError(
                    f"{name} is {factor}; give a whole factor of at least 1: growing repeats whole units."
                )

    @property
    def inner_factor(self) -> int:
        """Of inner sizes."""
        return self.width if self.inner is None else self.inner


def refuse_configuration(config: "PreTrainedConfig", growth: Growth) -> None:
    """Checks that a model can be grown by the rules of this package.

    Raises:
        UnsupportedModelError: a family or a field (named) that no rule covers.
        ConfigError: no growth, or experts where there are none.
    """
    family = config.model_type
    if family not in FAMILIES:
        raise UnsupportedModelError(f"{family} cannot be grown yet; families with tested rules: {', '.join(FAMILIES)}.")
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(f"{family}: quantised weights cannot be grown; load and save dense weights first.")
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise UnsupportedModelError(f"{family}: word_embed_proj_dim differs from hidden_size; no rule covers that.")
    layers = config.num_hidden_layers if growth.num_layers is None else growth.num_layers
    if layers < config.num_hidden_layers:
        raise ConfigError(f"layers is {layers}, fewer than the {config.num_hidden_layers} of the model; growing adds.")
    if growth.experts > 1 and count_experts(config) is None:
        raise ConfigError(f"experts is {growth.experts}, but {family} has no experts; leave it out.")
    if growth.width == growth.experts == growth.inner_factor == 1 and layers == config.num_hidden_layers:
        raise ConfigError("nothing grows: give --width, --inner, --layers or --experts beyond what the model has.")


def layer_sources(num_layers: int, num_grown: int, depth: str) -> list[int]:
    """For each of `num_grown` layers the index of the small model's layer that it is copied from."""
    if depth == "stack":
        return [layer % num_layers for layer in range(num_grown)]
    return [layer * num_layers // num_grown for layer in range(num_grown)]


def grown_configuration(config: "PreTrainedConfig", target: Growth, sources: list[int]) -> "PreTrainedConfig":
    """The configuration of the larger model. sources: for each new layer the layer that it comes from."""
    grown = copy.deepcopy(config)
    if getattr(config, "head_dim", None) is None and "head_dim" in config.to_dict():
        grown.head_dim = config.hidden_size // config.num_attention_heads
    factors = dict.fromkeys(WIDTH_FIELDS, target.width) | dict.fromkeys(INNER_FIELDS, target.inner_factor)
    for name, factor in {**factors, **dict.fromkeys((*EXPERT_FIELDS, "num_experts_per_tok"), target.experts)}.items():
        is_alias = name in getattr(config, "attribute_map", {})  # which would be multiplied twice
        if factor > 1 and isinstance(getattr(config, name, None), int) and not is_alias:
            setattr(grown, name, getattr(config, name) * factor)
    grown.num_hidden_layers = len(sources)
    for name in LAYER_LISTS:
        values = getattr(config, name, None)
        if isinstance(values, list | tuple):
            setattr(grown, name, [values[source] for source in sources])
    step = getattr(config, "decoder_sparse_step", None)
    if step is not None:  # by the index of a layer, which changes
        dense = {layer for layer in range(config.num_hidden_layers) if (layer + 1) % step}
        dense.update(config.mlp_only_layers or ())
        grown.decoder_sparse_step = 1
        grown.mlp_only_layers = [layer for layer, source in enumerate(sources) if source in dense]
    return grown


def growth_like(growth: Growth, config: "PreTrainedConfig", wanted: "PreTrainedConfig") -> Growth:
    """The growth with the factors from one configuration to another.

    Raises:
        ConfigError: a field (named) of the wanted model that no growth of this one has.
    """
    if wanted.model_type != config.model_type:
        raise ConfigError(f"model_type is {config.model_type} here and {wanted.model_type} in the wanted model.")
    inner, experts = (
        next((name for name in names if isinstance(getattr(config, name, None), int)), None)
        for names in (INNER_FIELDS[::-1], EXPERT_FIELDS)
    )
    return replace(
        growth,
        width=_factor("hidden_size", config, wanted),
        num_layers=wanted.num_hidden_layers,
        experts=_factor(experts, config, wanted),
        inner=_factor(inner, config, wanted),
    )


def check_like(config: "PreTrainedConfig", grown: "PreTrainedConfig", wanted: "PreTrainedConfig") -> None:
    """Raises `ConfigError` for the first field in which a grown configuration differs from the wanted one."""
    values, others = grown.to_dict(), wanted.to_dict()
    if others.get("head_dim", 0) is None:
        others["head_dim"] = wanted.hidden_size // wanted.num_attention_heads
    for name, value in values.items():
        if name not in NOT_COMPARED and value != others.get(name):
            raise ConfigError(
                f"{name} is {others.get(name)} in the wanted model; this one has {getattr(config, name, None)} and "
                f"would grow to {value}. Growing keeps vocabulary, positions and head size, and repeats whole units."
            )


def _factor(name: str | None, config: "PreTrainedConfig", wanted: "PreTrainedConfig") -> int:
    if name is None:
        return 1
    before, after = getattr(config, name), getattr(wanted, name, None)
    if not isinstance(after, int) or after < before or after % before:
        raise ConfigError(f"{name} is {before} here and {after} in the wanted model; growing needs a whole multiple.")
    return int(after // before)


def count_experts(config: "PreTrainedConfig") -> int | None:
    """Experts of a layer of a mixture; None of a dense model."""
    counts = (getattr(config, name, None) for name in EXPERT_FIELDS)
    return next((count for count in counts if isinstance(count, int)), None)
