"""Models with random weights in the shapes of published ones: what a step costs does not depend on the weights."""

from typing import Any

import torch
from transformers import PreTrainedModel

from treewise.errors import ConfigError, OutOfMemoryError, bytes_as_text
from treewise.nn.device import free_bytes
from treewise.nn.flops import auto_class

Fields = dict[str, Any]  # of a configuration
_NO_SPECIAL: Fields = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def _text(hidden: int, inner: int, layers: int, heads: int, key_heads: int, head_size: int, tokens: int) -> Fields:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": tokens}
    return {**sizes, "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head_size}


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, is_tied: bool = True) -> tuple[str, Fields]:
    return "qwen3", {**_text(hidden, inner, layers, heads, 8, 128, 151_936), "tie_word_embeddings": is_tied}


def _hybrid(text: Fields, head_size: int, num_linear: int, times: int) -> tuple[str, Fields]:
    """Qwen3.5 of text: some gated delta nets before each layer of attention."""
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    sizes = {"linear_key_head_dim": head_size, "linear_value_head_dim": head_size}
    kinds = (["linear_attention"] * num_linear + ["full_attention"]) * times
    return "qwen3_5_text", {**text, **heads, **sizes, "layer_types": kinds}


def _qwen_vl(
    text: Fields, tower: tuple[int, ...], full: list[int], sections: list[int], **more: int
) -> tuple[str, Fields]:
    """Qwen2.5-VL. tower: width, depth, heads and inner size. The last tokens of the vocabulary mark images."""
    marks = {"vision_start": 4, "vision_end": 3, "video": 2, "image": 1}
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": sections}
    sizes = dict(zip(("hidden_size", "depth", "num_heads", "intermediate_size"), tower, strict=True))
    vision = {**sizes, "fullatt_block_indexes": full, "out_hidden_size": text["hidden_size"], **more}
    return "qwen2_5_vl", {
        "text_config": {**text, "rope_parameters": rope, "max_position_embeddings": 131_072, **_NO_SPECIAL},
        "vision_config": vision,
        "tie_word_embeddings": True,
        **_NO_SPECIAL,
        **{f"{name}_token_id": text["vocab_size"] - number for name, number in marks.items()},
    }


_TINY: Fields = {**_text(32, 96, 2, 2, 2, 16, 64), "tie_word_embeddings": True}
_SMALL: Fields = {**_text(384, 1152, 8, 6, 2, 64, 8_192), "tie_word_embeddings": True}
_3B: Fields = {**_text(2048, 11_008, 36, 16, 2, 128, 151_936), "tie_word_embeddings": True}
# Names to the model type and the fields of its configuration: Qwen3's from its published config.json files.
SHAPES: dict[str, tuple[str, Fields]] = {
    "qwen3-tiny": ("qwen3", _TINY),
    "hybrid-tiny": _hybrid(_TINY, 8, 1, 1),
    "qwen3-17m": ("qwen3", _SMALL),
    "hybrid-18m": _hybrid(_SMALL, 32, 3, 2),
    "qwen2.5-vl-tiny": _qwen_vl(_TINY, (32, 2, 2, 48), [1], [4, 2, 2], window_size=56),
    "qwen2.5-vl-20m": _qwen_vl(_SMALL, (192, 6, 6, 576), [2, 5], [8, 12, 12]),
    "qwen2.5-vl-3b": _qwen_vl(_3B, (1280, 32, 16, 3420), [7, 15, 23, 31], [16, 24, 24]),
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
