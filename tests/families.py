"""Tiny random models of many families, with windows, chunks and expert counts small enough to matter on short trees."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GROUPED_EXPERTS = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

# What each family needs beyond the common shape.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma": {},
    "gemma2": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {"sliding_window": None},
    "smollm3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 24, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, **_EXPERTS},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0},
    "glm4": {},
    "glm4_moe": _GROUPED_EXPERTS,
    "ernie4_5": {},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "starcoder2": {"sliding_window": 5},
    "exaone4": {"sliding_window": 4, "sliding_window_pattern": 2},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 4,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 1,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {"sliding_window": 4},
    "deepseek_v3": {
        **_GROUPED_EXPERTS,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_key_value_heads": 4,
        "head_dim": 4,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "rope_scaling": None},
    "gpt_neox": {},
}
# Their own fast attention cannot cap scores or take sinks, so flat training runs them eagerly.
_EAGER = {"gemma2", "gpt_oss"}


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model in training mode, the same at every call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**_SHAPE, **FAMILIES.get(family, {}), **changes})
    config._attn_implementation = "eager" if family in _EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "sink" in name:  # zero at first, which would hide a mistake
            torch.nn.init.normal_(parameter)
    return model.to(dtype).train()
