"""Models with random weights in the shapes of published ones: what a step costs does not depend on the weights."""

from typing import Any

import torch
from torch import nn

from treewise.errors import ConfigError, OutOfMemoryError, bytes_as_text
from treewise.nn.device import free_bytes
from treewise.nn.flops import auto_class

_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
_NO_SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
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


def _qwen_vl(text: dict[str, Any], vision: dict[str, Any], sections: tuple[int, ...]) -> tuple[str, dict[str, Any]]:
    """Qwen2.5-VL; the last tokens of the vocabulary mark images."""
    marks = {"vision_start": 4, "vision_end": 3, "video": 2, "image": 1}
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": list(sections)}
    return "qwen2_5_vl", {
        "text_config": {**text, "rope_parameters": rope, "max_position_embeddings": 131_072, **_NO_SPECIAL},
        "vision_config": {**vision, "out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": text["tie_word_embeddings"],
        **_NO_SPECIAL,
        **{f"{name}_token_id": text["vocab_size"] - number for name, number in marks.items()},
    }


def _tower(hidden: int, depth: int, heads: int, intermediate: int, full: list[int], **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "depth": depth, "num_heads": heads, "intermediate_size": intermediate}
    return {**sizes, "fullatt_block_indexes": full, **changes}


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
    "qwen2.5-vl-tiny": _qwen_vl(_small(32, 2, 64), _tower(32, 2, 2, 48, [1], window_size=56), (4, 2, 2)),
    "qwen2.5-vl-20m": _qwen_vl(_small(384, 8, 8_192), _tower(192, 6, 6, 576, [2, 5]), (8, 12, 12)),
    "qwen2.5-vl-3b": _qwen_vl(
        {
            **{"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16},
            **{"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
        },
        _tower(1280, 32, 16, 3420, [7, 15, 23, 31]),
        (16, 24, 24),
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
        model: nn.Module = model_class.from_config(config, dtype=dtype)
    return model.train()
