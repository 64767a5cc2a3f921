"""Tiny hybrid models whose states matter: as configured at random, most forget within a token or never write."""

from typing import Any

import torch
from transformers import PreTrainedModel

from treewise.testing.families import tiny_model

_ALTERNATING = ["linear_attention", "full_attention", "linear_attention"]
_DELTA_NET = {
    "layer_types": _ALTERNATING,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
# Each family and what its mixers are; chunks of the scans are 64 tokens for delta rules, 32 for Mamba2.
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], **_EXPERTS, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": {**_DELTA_NET, **_EXPERTS},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS},
    "qwen4_exp_text": {"layer_types": ["linear_attention"] * 3},
    "olmo_hybrid": {**_DELTA_NET, "linear_num_key_heads": 4},
    "kimi_linear": {
        "layer_types": _ALTERNATING,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "head_dim": 4,
        **_EXPERTS,
    },
    "bailing_hybrid": {},
    "bamba": {"attn_layer_indices": [1], **_MAMBA2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        **_MAMBA2,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 32,
    },
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "mamba_expand": 2,
        "chunk_size": 32,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 32},
    "falcon_mamba": {"state_size": 4, "time_step_rank": 4},
    "minimax": {"layer_types": _ALTERNATING, "block_size": 16, "sliding_window": None},
    "recurrent_gemma": {"block_types": ["recurrent", "attention", "recurrent"], "lru_width": 32},
}


def hybrid(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny model whose recurrent layers remember some tens of tokens and write strongly."""
    return stir(tiny_model(family, dtype, **{**HYBRIDS[family], **changes}))


@torch.no_grad()
def stir(model: PreTrainedModel) -> PreTrainedModel:
    """Random decays, step sizes and projections, the same at every call."""
    generator = torch.Generator().manual_seed(7)

    def normal(parameter: torch.Tensor, mean: float, std: float) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            normal(parameter, -2.0, 0.5)
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            normal(parameter, -1.0, 0.5)
        elif name.endswith((".D", "conv1d.bias", "conv.bias")):
            normal(parameter, 0.5, 0.3)
        elif "conv" in name and parameter.dim() == 3:
            normal(parameter, 0.3, 0.5)
        elif parameter.dim() == 2 and "embed" not in name and "lm_head" not in name:
            normal(parameter, 0.0, 0.8 * parameter.shape[1] ** -0.5)
    return model
