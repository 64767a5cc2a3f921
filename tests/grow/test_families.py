"""Copying width and adding identity layers keeps the function, in every family that the rules claim."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from treewise.grow import grow
from treewise.grow.configuration import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MORE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8, "sliding_window": 6},
    "gpt_neox": {"num_key_value_heads": 4},
    "mistral": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 32, "num_key_value_heads": 4},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
}


def save_random(folder: Path, family: str, **more: Any) -> Any:
    """A random model with norms and biases that are not their starting values."""
    torch.manual_seed(1)
    sizes = {**SIZES, **MORE.get(family, {}), **more}
    if family in ("opt", "gpt_neox"):
        del sizes["num_key_value_heads"]
    if family == "opt":
        del sizes["intermediate_size"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "layers"), [(2, 2), (1, 5), (3, 4)])
def test_logits_stay(family: str, width: int, layers: int, tmp_path: Path) -> None:
    save_random(tmp_path / "small", family)
    report = grow(tmp_path / "small", tmp_path / "big", width=width, num_layers=layers, noise=0.1)
    assert report.logit_difference is not None
    assert report.logit_difference < 1e-5


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_more_experts_keep_logits(family: str, tmp_path: Path) -> None:
    save_random(tmp_path / "small", family)
    report = grow(tmp_path / "small", tmp_path / "big", experts=2, width=2, noise=0.1)
    assert report.logit_difference is not None
    assert report.logit_difference < 1e-5
