"""Tiny random models of every family of transformers, made from its configuration class by rule.

A rule gives a field its tiny value wherever a configuration has a field of that name (under its own name or the common
one of `attribute_map`). What a family needs beyond the rules is in FAMILIES. Windows, chunks and counts of experts are
small enough to matter on short trees.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from treewise.nn.platform.releases import configuration_fields

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "query_pre_attn_scalar": 8,
}
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_RECURRENT = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_d_head", "mamba_chunk_size"), 8),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "mamba_n_groups": 1, "n_mamba_heads": 2},
}
_OLDER_NAMES = {
    **dict.fromkeys(("n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("n_layer", "n_layers", "decoder_layers"), 3),
    **dict.fromkeys(("n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **{"n_embd": 32, "d_model": 32, "n_positions": 256, "encoder_layers": 1},
}
_OTHER_TOWERS = {
    **dict.fromkeys(("embed_dim", "out_hidden_size"), 32),
    **{"image_size": 16, "patch_size": 8, "depth": 1, "num_heads": 4},
    **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
}
_NO_DROPOUT = dict.fromkeys(
    (
        *("attention_dropout", "hidden_dropout", "activation_dropout", "residual_dropout", "embedding_dropout"),
        *("attn_dropout", "embed_dropout", "dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"),
        *("resid_pdrop", "embd_pdrop", "attn_pdrop", "layerdrop", "encoder_layerdrop", "decoder_layerdrop"),
        "router_jitter_noise",
    ),
    0.0,
)
_RULES = {**_SHAPE, **_EXPERTS, **_LATENT, **_RECURRENT, **_OLDER_NAMES, **_OTHER_TOWERS, **_NO_DROPOUT}

_IS_DECODER = {"is_decoder": True}
# Positions with three components, over the 4 (or 2) frequencies of a head.
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_MROPE_2 = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}}
_ALTERNATING = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# Three layers of a family whose pattern is longer would all be of one kind.
_BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_SHORT_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
# What a family needs beyond the rules.
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "gemma3_text", "kolibri1", "olmo3"),
        _BOTH_KINDS,
    ),
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "ernie", "megatron-bert", "rembert"),
            *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
        ),
        _IS_DECODER,
    ),
    **dict.fromkeys(
        ("glm4v_text", "glm_ocr_text", "paddleocr_vl_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
        _MROPE,
    ),
    **dict.fromkeys(
        ("bailing_hybrid", "granitemoehybrid", "kimi_linear", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        _ALTERNATING,
    ),
    "apertus1p5": {
        **{"image_token_offset": 32, "audio_token_offset": 40},  # where the tokens of each start
        "vision_config": {
            **{"codebook_size": 8, "latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1]},
            **{"num_res_blocks": 1, "attn_resolutions": [8], "resolution": 16},
        },
        "audio_config": {"codebook_size": 8, "codebook_dim": 32, "num_filters": 4},
    },
    "codegen": {"rotary_dim": 4},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "cosmos3_edge": {
        "text_config": _MROPE,
        **{"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {**_BOTH_KINDS, "n_input_layers": 1, "n_output_layers": 1},  # the layer between runs twice
    "electra": {**_IS_DECODER, "embedding_size": 32},
    "falcon_h1": {"mamba_d_ssm": 64},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 24],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    },
    **{key: {"text_config": {"global_head_dim": 8}} for key in ("gemma4", "gemma4_unified")},
    **{key: {"global_head_dim": 8} for key in ("gemma4_text", "gemma4_unified_text")},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "laurel_rank": 8,
    },
    "glm4v_moe_text": _MROPE_2,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 4},
    "gpt_oss": {"rope_scaling": None},
    "gptj": {"rotary_dim": 4},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3},
    "granitemoe": {"logits_scaling": 3.0},
    "hyperclovax": {"logits_scaling": 1.7},
    "hunyuan_vl": {
        "text_config": {
            "rope_parameters": {
                **{"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 10000.0},
                "xdrope_section": [1, 1, 1, 1],
            }
        }
    },
    "hy_v4_vl": {"text_config": _MROPE_2, "vision_config": {"max_image_size": 32}},
    **{key: {"vision_config": {"text_hidden_size": 32}} for key in ("inkling2", "inkling2_loop")},
    "lara_mini": {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
    "lfm2": _SHORT_CONVOLUTIONS,
    "lfm2_moe": _SHORT_CONVOLUTIONS,
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention"]},
    "llama4_text": {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 1,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "no_rope_layers": [1, 0, 1],
        "floor_scale": 4,  # positions from which queries are scaled
    },
    "longcat_flash": {
        "head_dim": 4,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 1,
    },
    "mamba2": {"num_heads": 8, "state_size": 8, "chunk_size": 8, "n_groups": 1},
    "moshi": {"audio_vocab_size": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "minimax": {"sliding_window": None},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"]},
    "modernbert-decoder": {"local_attention": 8},
    "molmo2": {"vision_config": {"image_size": [16, 16]}, "adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "phi3": {"sliding_window": None},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {**_IS_DECODER, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16)},
    "xmod": {**_IS_DECODER, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {
        "num_hidden_layers": 6,
        "layer_types": ["linear_attention", "hybrid"] * 3,
        "hybrid_layer_ids": [1, 3, 5],
        "num_mem_blocks": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}
# Their own fast attention cannot cap scores or take sinks, so flat training runs them eagerly.
_EAGER = {"gemma2", "gpt_oss"}


def causal_families() -> list[str]:
    """Every family that transformers builds a causal language model for."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(
    family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, *, sees: bool = False, **changes: Any
) -> PreTrainedModel:
    """A random model of a family in training mode, the same at every call: 3 layers, width 32, 64 tokens.

    Parameters:
        family: `model_type` of the family's configuration (`llama`, `qwen3`, `qwen3_next`, ...).
        seed: of torch's global generator, which is set.
        sees: with a tower, where the family has a class without one, too.
        changes: fields of the configuration in place of the tiny ones.

    Raises:
        KeyError: a family that this transformers does not have.
    """
    torch.manual_seed(seed)
    kind = CONFIG_MAPPING[family]
    config = kind(**_tiny_fields(kind, {**FAMILIES.get(family, {}), **changes}))
    config._attn_implementation = "eager" if family in _EAGER else None
    is_text = family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not sees
    builder = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    model = builder.from_config(config)
    embedding = model.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:  # an ordinary token here
        embedding.padding_idx = None
        torch.nn.init.normal_(embedding.weight.data[0], std=float(embedding.weight.data.std()))
    for name, parameter in model.named_parameters():
        if "sink" in name:  # zero at first, which would hide a mistake
            torch.nn.init.normal_(parameter)
        elif parameter.ndim > 1 and not parameter.any():  # Gemma 3's projector
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).train()


def _tiny_fields(kind: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments of a tiny configuration, those of its parts as dictionaries."""
    common_names = {own: common for common, own in getattr(kind, "attribute_map", {}).items()}
    fields: dict[str, Any] = {}
    parts = _parts(kind)
    for name in configuration_fields(kind):
        part = parts.get(name)
        if part is not None:
            fields[name] = {"model_type": part.model_type, **_tiny_fields(part, FAMILIES.get(part.model_type, {}))}
        elif name in _RULES:
            fields[name] = _RULES[name]
        elif common_names.get(name) in _RULES:
            fields[name] = _RULES[common_names[name]]
    if "kv_lora_rank" in fields:  # latent attention has keys for every head
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name, change in changes.items():
        is_part = isinstance(change, dict) and isinstance(fields.get(name), dict)
        fields[name] = {**fields[name], **change} if is_part else change
    return fields


def _parts(kind: Any) -> dict[str, Any]:
    """The configuration classes of a configuration's parts; where a part may be any, the default one's."""
    parts = dict(kind.sub_configs)
    if AutoConfig in parts.values():
        default = kind()
        parts = {name: type(getattr(default, name)) for name in parts if getattr(default, name, None) is not None}
    return {name: part for name, part in parts.items() if configuration_fields(part)}
