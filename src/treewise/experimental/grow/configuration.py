"""The configuration of a grown model, and from which layer each of its layers comes.

Head size, vocabulary, positions, rotary tables and the number of experts stay; hidden size, the numbers of heads and
inner sizes grow by one whole factor, so that a wider model repeats each unit of the smaller one equally often and norms
keep their mean square.

Depth: `zero`: each layer is followed by copies of itself whose results are multiplied by zero, so the function is kept
and the copies learn from the first step on. `stack`: the whole stack again (StackBERT, Gong et al., 2019), which keeps
no function.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
WIDTH_FIELDS = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "word_embed_proj_dim",
    "intermediate_size",
    "ffn_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
LAYER_LISTS = ("layer_types", "no_rope_layers")  # one entry a layer


@dataclass(frozen=True, slots=True)
class Growth:
    """What `grow` makes.

    Attributes:
        width: whole factor of hidden size, heads, key heads and the inner sizes of MLPs and experts.
        num_layers: layers of the grown model; None: as many as the small one has.
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
    num_layers: int | None = None
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
        if not isinstance(self.width, int) or self.width < 1:
            raise ConfigError(f"width is {self.width}; give a whole factor of at least 1: growing repeats whole units.")


def refuse_configuration(config: "PreTrainedConfig", growth: Growth) -> None:
    """Checks that a model can be grown by the rules of this package.

    Raises:
        UnsupportedModelError: a family or a field (named) that no rule covers.
        ConfigError: no growth.
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
    if growth.width == 1 and layers == config.num_hidden_layers:
        raise ConfigError("nothing grows: give --width, or more --layers than the model has.")


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
    for name in WIDTH_FIELDS:
        is_alias = name in getattr(config, "attribute_map", {})  # which would be multiplied twice
        if isinstance(getattr(config, name, None), int) and not is_alias:
            setattr(grown, name, getattr(config, name) * target.width)
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
