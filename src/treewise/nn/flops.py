"""FLOPs of one training step, flat and on the tree: the ceiling of a measured speed-up.

Conventions. A multiply-add is two FLOPs. A linear layer costs one pass forward and one for each gradient (of its
input, and of its weight where that is trained). An expert counts by the fraction of experts that a token visits.
Attention costs `2 H (D + D of the values)` per pair of query and key it may see, which is `4 H D`; its backward 2.5
times that, as in FlashAttention (arXiv 2307.08691), whose backward computes the scores again. The head counts per
projected row, which is a row with a trained target; rows beyond the chunk of logits that is kept for the backward are
projected once more there, which is not counted. The tower runs once for each distinct image of a forest, and flat once
for each image of each trajectory. Embeddings, norms, activations, the scans of recurrent layers and the optimizer are
left out, on both sides.

Letters: T tree tokens, N trajectories, S segments.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from treewise.nn.vision.costs import VisionCosts, vision_costs
from treewise.planning.partition import ATTENTION_BACKWARD
from treewise.planning.planner import Plan
from treewise.planning.planner import plan as make_plan
from treewise.tree.forest import Forest

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


@dataclass(frozen=True, slots=True)
class LayerReach:
    """How far attention looks back in some layers: a window, a chunk, or everything."""

    window: int | None = None
    chunk: int | None = None

    def pairs_below(self, depth: np.ndarray) -> np.ndarray:
        """Pairs of all queries at depths 0..depth-1 of one path ([..] int64 in and out)."""
        if self.window is not None:
            near = np.minimum(depth, self.window)
            return near * (near + 1) // 2 + (depth - near) * self.window
        if self.chunk is not None:
            full, rest = np.divmod(depth, self.chunk)
            return full * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2
        return depth * (depth + 1) // 2


@dataclass(frozen=True, slots=True)
class FlopModel:
    """What a model's step costs. All FLOPs are of one forward, but for `*_backward`.

    linear, linear_backward: per token. head, head_backward: per projected row. pair_forward: per pair, for all layers
    of a reach together. gateway_values: keys and values per token, all layers. activation_values: an estimate of
    the values kept per token for the backward (`engine.step_memory` counts them). vocabulary: logits of a row. vision:
    of the tower and its projector; None without.
    """

    linear: float
    linear_backward: float
    head: float
    head_backward: float
    pair_forward: tuple[tuple[LayerReach, float], ...]
    num_parameters: int
    num_trained_parameters: int
    gateway_values: int
    activation_values: int
    vision: VisionCosts | None = None
    vocabulary: int = 0

    def flat(self, forest: Forest) -> float:
        """One forward and backward of every trajectory alone."""
        step = self._step(forest.num_flat_tokens, flat_head_rows(forest), forest.path_lengths)
        return step + self._images(forest, forest.multiplicity[forest.images.start])

    def leaf(self, forest: Forest) -> float:
        """The same without the trajectories contained in another, whose trained tokens count in the longer one."""
        lengths = forest.path_lengths[forest.leaf_trajectories]
        ends = np.sort(forest.ends[forest.leaf_trajectories])
        start = forest.images.start
        num_leaves = np.searchsorted(ends, forest.subtree_end[start]) - np.searchsorted(ends, start)
        return self._step(int(lengths.sum()), leaf_head_rows(forest), lengths) + self._images(forest, num_leaves)

    def native_flat(self, forest: Forest) -> float:
        """Every trajectory through the model's own forward: logits of all rows, kept for the backward."""
        head = self.head + self.head_backward
        trained_rows = self._step(forest.num_flat_tokens, 0, forest.path_lengths)
        images = self._images(forest, forest.multiplicity[forest.images.start])
        return trained_rows + images + head * forest.num_flat_tokens

    def tree(self, forest: Forest) -> float:
        """One forward and backward of every tree token and of every distinct image."""
        first = forest.segments.depth
        last = first + forest.segments.lengths
        step = self._step(forest.num_tokens, tree_head_rows(forest), last, first)
        return step + self._images(forest, forest.images.is_first_place)

    def of_tokens(self, depth: np.ndarray) -> np.ndarray:
        """[T] float64: one forward and backward of each token, without the head. depth: [T] integers."""
        low = depth.astype(np.int64)
        pairs = sum(cost * (reach.pairs_below(low + 1) - reach.pairs_below(low)) for reach, cost in self.pair_forward)
        costs: np.ndarray = self.linear + self.linear_backward + (1.0 + ATTENTION_BACKWARD) * pairs + np.zeros(len(low))
        return costs

    def recomputed(self, plan: Plan) -> float:
        """What a plan adds: one more forward of the open tokens that are not held, without the head, and of the images
        if their graph is not kept."""
        again = [batch.positions() for batch in plan.micro_batches if batch.is_open and not batch.is_held]
        positions = np.concatenate([np.zeros(0, dtype=np.int64), *again])
        depth = plan.forest.depth[positions].astype(np.int64)
        total = self.linear * len(depth) + self._pairs(depth + 1, depth)
        if self.vision is not None and self.vision.is_trained and not self.keeps_images(plan):
            total += float(self.vision.forward(self._distinct_rows(plan.forest)).sum())
        return total

    def planned(self, plan: Plan) -> float:
        """Everything that a plan computes."""
        return self.tree(plan.forest) + self.recomputed(plan)

    def plan(self, forest: Forest, max_tokens: int | None, *, hold: str = "auto") -> Plan:
        """The plan of a budget (`treewise.plan`).

        With images, the cheaper of two: micro-batches that use all of the budget, and smaller ones that leave room for
        the graph of the tower, which then runs once instead of twice.

        Raises:
            PlanError: see `treewise.plan`.
        """
        full = make_plan(forest, max_tokens, hold=hold)
        if max_tokens is None or self.vision is None or self.keeps_images(full):
            return full
        room = math.floor(max_tokens - self.tokens_per_row * self._distinct_rows(forest).sum())
        if room < max(1, forest.images.largest):
            return full
        smaller = replace(make_plan(forest, room, hold=hold), max_tokens=max_tokens)
        return min((full, smaller), key=self.recomputed)

    def keeps_images(self, plan: Plan) -> bool:
        """Whether the graph of all images of a plan fits beside its micro-batches, so that the tower runs once.

        A feature row takes the budget of as many tokens as have its activations.
        """
        if self.vision is None or plan.max_tokens is None:
            return True
        largest = max(tokens for _, tokens in plan.timeline)
        return bool(largest + self.tokens_per_row * self._distinct_rows(plan.forest).sum() <= plan.max_tokens)

    def kept_image_values(self, plan: Plan) -> int:
        """Values of the tower that are kept beside the micro-batches of a plan; 0 where it runs twice."""
        if self.vision is None or not self.keeps_images(plan):
            return 0
        return round(self.vision.activation_values * self._distinct_rows(plan.forest).sum())

    @property
    def tokens_per_row(self) -> float:
        """Tokens that keep as many values for the backward as a feature row does in tower and projector."""
        return 0.0 if self.vision is None else self.vision.activation_values / max(self.activation_values, 1)

    def _distinct_rows(self, forest: Forest) -> np.ndarray:
        """[n] int64, the feature rows of each distinct image of a forest."""
        if self.vision is None:
            return np.zeros(0, dtype=np.int64)
        return self.vision.rows_of(forest)[forest.images.is_first_place]

    def _images(self, forest: Forest, times: np.ndarray) -> float:
        """Forward and backward of the images of a forest, each so often ([I] integers)."""
        if self.vision is None or not len(forest.images):
            return 0.0
        return float((self.vision.step(self.vision.rows_of(forest)) * times).sum())

    def _step(self, num_tokens: int, num_rows: int, last: np.ndarray, first: np.ndarray | int = 0) -> float:
        linear = (self.linear + self.linear_backward) * num_tokens
        head = (self.head + self.head_backward) * num_rows
        return linear + head + (1 + ATTENTION_BACKWARD) * self._pairs(last, first)

    def _pairs(self, last: np.ndarray, first: np.ndarray | int) -> float:
        low, high = np.asarray(first, dtype=np.int64), np.asarray(last, dtype=np.int64)
        return float(
            sum(cost * (reach.pairs_below(high) - reach.pairs_below(low)).sum() for reach, cost in self.pair_forward)
        )


def flop_model(model: PreTrainedModel) -> FlopModel:
    """The costs of a transformers causal LM, read from the shapes of its parameters; `meta` tensors will do.

    In a model that sees, `vision` holds what its tower costs for an image.
    """
    config = model.config.get_text_config()
    decoder = model if config is model.config else model.get_decoder()
    per_token = {id(each) for each in decoder.parameters()}
    head = model.get_output_embeddings()
    head_modules = set(head.modules()) if head is not None else set()
    num_experts, num_visited = _expert_counts(config)
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
        visits = num_visited if is_expert else part
        activations += visits * sum(parameter.shape[-2:])
    norms = sum(_norm_width(module, name, config) for name, module in decoder.named_modules())
    head_flops = 2.0 * head.weight.numel() if head is not None else 0.0
    is_head_trained = head is not None and head.weight.requires_grad
    pairs = _attention_pairs(config)
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
        vision=vision_costs(model, ACTIVATIONS_PER_LINEAR),
        vocabulary=0 if head is None else head.weight.shape[0],
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


# -- gateways ---------------------------------------------------------------------------------------------------------


def gateway_values(config: PreTrainedConfig) -> int:
    """Keys and values (numbers) of one gateway token over all layers, as attention receives them; 0 without attention.

    config: a transformers configuration. Hybrid models count their attention layers, latent attention its full heads.
    """
    values = 0
    for reach in _layer_reaches(config):
        _, key_heads, key_size, value_size = _head_sizes(config)
        # Sliding layers of MiMo have twice the key heads.
        factor = 2 if config.model_type == "mimo_v2_flash" and reach.window is not None else 1
        values += factor * key_heads * (key_size + value_size)
    return values


def gateway_bytes(num_values: int, dtype: torch.dtype) -> int:
    """Bytes of so many keys and values in `dtype`, and of their gradients in float32 or wider."""
    return num_values * (dtype.itemsize + torch.promote_types(dtype, torch.float32).itemsize)


# -- tokens and rows of a forest --------------------------------------------------------------------------------------


def flat_head_rows(forest: Forest) -> int:
    """Trained tokens of all trajectories: each is predicted by a row of its own."""
    if forest.tree_streams:
        return int(forest.multiplicity[forest.token_weights() > 0].sum())
    return sum(item.num_trained_tokens for item in forest.trajectories)


def tree_head_rows(forest: Forest) -> int:
    """Tree tokens that predict at least one trained token."""
    return len(np.unique(forest.parent[forest.token_weights() > 0]))


def leaf_head_rows(forest: Forest) -> int:
    """Trained tokens on the paths of the `leaf_trajectories`."""
    # A segment adds its count to every path below it: +count where its subtree begins, -count where it ends.
    segments = forest.segments
    count = np.add.reduceat((forest.token_weights() > 0).astype(np.int64), segments.start)
    change = np.zeros(forest.num_tokens + 1, dtype=np.int64)
    change[segments.start] += count
    np.subtract.at(change, segments.subtree_end, count)
    on_path = np.cumsum(change)[segments.start]
    return int(on_path[segments.end_segment[forest.leaf_trajectories]].sum())


# -- shapes of a model ------------------------------------------------------------------------------------------------


def _matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters that multiply activations, each once."""
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2 and "bias" not in name and id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, f"{module_name}.{name}", parameter


def _norm_width(module: nn.Module, name: str, config: PreTrainedConfig) -> int:
    """Values per token that a norm of the decoder takes in; 0 for other modules. One of queries or keys takes every
    head."""
    weight = getattr(module, "weight", None)
    if "norm" not in type(module).__name__.lower() or not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return 0
    heads, key_heads, key_size, _ = (
        _head_sizes(config) if getattr(config, "num_attention_heads", None) else (1, 1, 0, 0)
    )
    is_per_head = weight.shape[0] == key_size and weight.shape[0] != config.hidden_size
    part = name.rpartition(".")[2].lower()
    count = heads if is_per_head and part.startswith("q") else key_heads if is_per_head else 1
    return count * weight.shape[0]


def _expert_counts(config: PreTrainedConfig) -> tuple[int, int]:
    """Experts of a layer, and how many of them a token visits; (1, 1) for a dense model."""
    total = next((getattr(config, name) for name in EXPERT_COUNTS if getattr(config, name, None)), 1)
    visited = next((getattr(config, name) for name in EXPERTS_PER_TOKEN if getattr(config, name, None)), total)
    return int(total), int(visited)


def _head_sizes(config: PreTrainedConfig) -> tuple[int, int, int, int]:
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


def _attention_pairs(config: PreTrainedConfig) -> Counter[LayerReach]:
    pairs: Counter[LayerReach] = Counter()
    for reach in _layer_reaches(config):
        heads, _, key_size, value_size = _head_sizes(config)
        pairs[reach] += 2 * heads * (key_size + value_size)
    return pairs
