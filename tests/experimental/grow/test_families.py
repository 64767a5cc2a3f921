"""Copying width and adding identity layers keeps the function, in every family that the rules claim."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from treewise.experimental.grow import grow
from treewise.experimental.grow.configuration import FAMILIES

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
        sizes.pop("num_key_value_heads")
    if family == "opt":
        del sizes["intermediate_size"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


ODD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "intermediate_size": 37}),
    ("llama", {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 1}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 5}),
    ("qwen3", {"tie_word_embeddings": True, "hidden_size": 28, "num_attention_heads": 3, "num_key_value_heads": 1}),
    ("mistral", {"tie_word_embeddings": True, "num_key_value_heads": 1, "sliding_window": 4}),
    (
        "smollm3",
        {"tie_word_embeddings": False, "attention_bias": True, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    ),
    ("olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True}),
    (
        "gemma3_text",
        {
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    ("gemma3_text", {"head_dim": 6, "final_logit_softcapping": 5.0, "use_bidirectional_attention": False}),
    ("phi3", {"tie_word_embeddings": True, "num_key_value_heads": 1, "partial_rotary_factor": 0.5}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True, "rotary_pct": 0.5}),
    ("gpt_neox", {"attention_bias": False}),
    ("opt", {"tie_word_embeddings": False, "enable_bias": False}),
    ("opt", {"layer_norm_elementwise_affine": False, "tie_word_embeddings": False}),
    ("mixtral", {"tie_word_embeddings": True, "num_local_experts": 3, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1], "attention_bias": True, "num_experts_per_tok": 3}),
]


SMALL = [(family, {}, {"width": 3, "num_layers": 4}) for family in FAMILIES]
MORE_CASES = [(each, {}, target) for each in FAMILIES for target in ({"width": 2}, {"num_layers": 5})]
MORE_CASES += [(family, changes, {"width": 3, "num_layers": 7}) for family, changes in ODD]


@pytest.mark.parametrize(
    ("family", "changes", "target"),
    [*SMALL, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE_CASES)],
    ids=lambda each: each if isinstance(each, str) else "-".join(each),
)
def test_logits_stay(family: str, changes: dict[str, Any], target: dict[str, int], tmp_path: Path) -> None:
    save_random(tmp_path / "small", family, **changes)
    assert grow(tmp_path / "small", tmp_path / "big", **target, noise=0.1).logit_difference < 1e-5
