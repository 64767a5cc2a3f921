"""Models with random weights in the shapes of published ones: what a step costs does not depend on the weights."""

from typing import Any

import torch
from torch import nn

from treewise.errors import ConfigError, OutOfMemoryError, bytes_as_text
from treewise.nn.device import free_bytes

_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
_DELTA_NET = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}


def _qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, *, is_tied: bool = True
) -> tuple[str, dict[str, Any]]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return "qwen3", {**_QWEN3, **sizes, "num_attention_heads": heads, "tie_word_embeddings": is_tied}


def _small(hidden: int, layers: int, vocabulary: int, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": max(2, hidden // 64), "num_key_value_heads": 2, "head_dim": min(64, hidden // 2)}
    return {**sizes, **heads, "vocab_size": vocabulary, "tie_word_embeddings": True, **changes}


# Names to the model type and the fields of its configuration: Qwen3's from its published config.json files.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tiny": ("qwen3", _small(32, 2, 64)),
    "hybrid-tiny": (
        "qwen3_5_text",
        {
            **_small(32, 2, 64),
            **_DELTA_NET,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "qwen3-17m": ("qwen3", _small(384, 8, 8_192)),
    "hybrid-18m": (
        "qwen3_5_text",
        {
            **_small(384, 8, 8_192),
            **_DELTA_NET,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        },
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, is_tied=False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, is_tied=False),
}


def random_model(name: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A model of a shape with random weights, in training mode; the same at every call.

    Raises:
        ConfigError: an unknown shape.
        OutOfMemoryError: weights and gradients that do not fit in the free memory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is unknown; choose one of {', '.join(SHAPES)}.")
    kind, fields = SHAPES[name]
    config = AutoConfig.for_model(kind, **fields, max_position_embeddings=262_144, pad_token_id=None)
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    needed, free = 2 * num_parameters * dtype.itemsize, free_bytes(device)
    if needed > free:
        raise OutOfMemoryError(
            f"weights and gradients take {bytes_as_text(needed)}, of which {bytes_as_text(free)} are free."
        )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()
