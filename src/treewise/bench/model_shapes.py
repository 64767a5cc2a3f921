"""Models with random weights in the shapes of published ones: what a step costs does not depend on the weights."""

from typing import Any

import torch
from transformers import PreTrainedModel

from treewise.errors import ConfigError, OutOfMemoryError, bytes_as_text
from treewise.nn.device import free_bytes
from treewise.nn.model_flops import auto_class

Fields = dict[str, Any]  # of a configuration


def text_shape(hidden: int, inner: int, layers: int, heads: int, key_heads: int, head_size: int, tokens: int) -> Fields:
    """The fields of a decoder."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": tokens}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head_size}


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, is_tied: bool = True) -> tuple[str, Fields]:
    return "qwen3", {**text_shape(hidden, inner, layers, heads, 8, 128, 151_936), "tie_word_embeddings": is_tied}


def _hybrid(text: Fields, head_size: int, num_linear: int, times: int) -> tuple[str, Fields]:
    """Qwen3.5 of text: some gated delta nets before each layer of attention."""
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    sizes = {"linear_key_head_dim": head_size, "linear_value_head_dim": head_size}
    kinds = (["linear_attention"] * num_linear + ["full_attention"]) * times
    return "qwen3_5_text", {**text, **heads, **sizes, "layer_types": kinds}


_TINY: Fields = {**text_shape(32, 96, 2, 2, 2, 16, 64), "tie_word_embeddings": True}
_SMALL: Fields = {**text_shape(384, 1152, 8, 6, 2, 64, 8_192), "tie_word_embeddings": True}
# Names to the model type and the fields of its configuration: Qwen3's from its published config.json files.
SHAPES: dict[str, tuple[str, Fields]] = {
    "qwen3-tiny": ("qwen3", _TINY),
    "hybrid-tiny": _hybrid(_TINY, 8, 1, 1),
    "qwen3-17m": ("qwen3", _SMALL),
    "hybrid-18m": _hybrid(_SMALL, 32, 3, 2),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, is_tied=False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, is_tied=False),
}


def random_model(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of a shape with random weights, in training mode; the same at every call.

    Raises:
        ConfigError: an unknown shape.
        OutOfMemoryError: weights and gradients that do not fit in the free memory.
    """
    from transformers import AutoConfig

    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is unknown; choose one of {', '.join(SHAPES)}.")
    kind, fields = SHAPES[name]
    if "text_config" not in fields:
        fields = {**fields, "max_position_embeddings": 262_144, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **fields)
    model_class = auto_class(config)
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in model_class.from_config(config).parameters())
    needed, free = 2 * num_parameters * dtype.itemsize, free_bytes(device)
    if needed > free:
        raise OutOfMemoryError(
            f"weights and gradients take {bytes_as_text(needed)}, of which {bytes_as_text(free)} are free."
        )
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = model_class.from_config(config, dtype=dtype)
    model.train()
    return model
