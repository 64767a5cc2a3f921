"""Attention of packed sequences without padding, by the best kernel that a device has; for the contestants.

Sequence `i` has queries `cu_q[i]:cu_q[i + 1]` and keys `cu_k[i]:cu_k[i + 1]`, causal and aligned at their ends (the
last query sees the last key), which is the contract of FlashAttention's `flash_attn_varlen_func`.

Letters: T queries, K keys, H query heads, D head size.
"""

from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

HALF = (torch.bfloat16, torch.float16)


@torch.compiler.disable  # its loop over sequences would be a graph of its own for every row
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """[T, H, D] from [T, H, D] queries and [K, Hkv, D] keys and values. cu_seqlens: [sequences + 1] int32."""
    name = kernel(query.device.type, query.dtype)
    lengths = (max_seqlen_q, max_seqlen_k)
    if name == "sdpa":
        return _loop(query, key, value, tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist()), softmax_scale)
    if name == "torch varlen":
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.varlen import varlen_attn

        # cuDNN, which later versions of torch prefer, takes no grouped heads and aligns sequences at their beginning.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = varlen_attn(
                query,
                key,
                value,
                cu_seqlens_q,
                cu_seqlens_k,
                *lengths,
                scale=softmax_scale,
                window_size=(-1, 0),
                enable_gqa=query.shape[1] != key.shape[1],
            )
        assert isinstance(out, torch.Tensor)
        return out
    function = _flash_function(name)
    out = function(query, key, value, cu_seqlens_q, cu_seqlens_k, *lengths, softmax_scale=softmax_scale, causal=True)
    return out[0] if isinstance(out, tuple) else out


@cache
def kernel(device_type: str, dtype: torch.dtype) -> str:
    """Which kernel is taken: FlashAttention 3, FlashAttention 2, torch's own copy of it, or one SDPA a sequence."""
    if device_type == "cuda" and dtype in HALF:
        for name, module in (("flash_attn 3", "flash_attn_interface"), ("flash_attn 2", "flash_attn")):
            if find_spec(module) is not None:
                return name
        if find_spec("torch.nn.attention.varlen") is not None:
            return "torch varlen"
    return "sdpa"


def _flash_function(name: str) -> Any:
    if name == "flash_attn 3":
        from flash_attn_interface import flash_attn_varlen_func
    else:
        from flash_attn import flash_attn_varlen_func
    return flash_attn_varlen_func


def _loop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_bounds: tuple[int, ...],
    k_bounds: tuple[int, ...],
    scale: float | None,
) -> torch.Tensor:
    """One call a sequence."""
    outputs, is_grouped = [], query.shape[1] != key.shape[1]
    for index in range(len(q_bounds) - 1):
        q_rows, k_rows = slice(*q_bounds[index : index + 2]), slice(*k_bounds[index : index + 2])
        own, keys, values = (x.transpose(0, 1)[None] for x in (query[q_rows], key[k_rows], value[k_rows]))
        rows, columns = own.shape[2], keys.shape[2]
        mask = None if rows == columns else _aligned_at_end(rows, columns, query.device)
        out = F.scaled_dot_product_attention(
            own, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


@lru_cache(maxsize=256)
def _aligned_at_end(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)
