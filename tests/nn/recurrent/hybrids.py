"""Tiny hybrid models whose states matter: as configured at random, most forget within a token or never write."""

from typing import Any

import torch
from transformers import PreTrainedModel

from treewise.testing.families import tiny_model

# Each family, and what it has other than the tiny model of that family; chunks of the scans are 64 tokens for delta
# rules, 32 for Mamba2.
_ALTERNATING = ["linear_attention", "full_attention", "linear_attention"]
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {},
    "lfm2_moe": {"shared_expert_intermediate_size": 24, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen4_exp_text": {"layer_types": ["linear_attention"] * 3},
    "olmo_hybrid": {"layer_types": _ALTERNATING, "linear_num_key_heads": 4},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "shared_expert_intermediate_size": 24},
    "bailing_hybrid": {},
    "bamba": {"mamba_chunk_size": 32},
    "granitemoehybrid": {"shared_intermediate_size": 24, "mamba_chunk_size": 32},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba"],
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 32},
    },
    "falcon_h1": {"mamba_chunk_size": 32},
    "zamba2": {"n_mamba_heads": 8, "chunk_size": 32},
    "jamba": {"attn_layer_period": 3, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "mamba2": {"n_groups": 2, "chunk_size": 32},
    "falcon_mamba": {"state_size": 4, "time_step_rank": 4},
    "minimax": {"layer_types": _ALTERNATING, "block_size": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention", "recurrent"]},
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
