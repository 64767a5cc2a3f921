"""Attention of packed sequences without padding, by the best kernel that a device has; for the contestants.

Sequence `i` has queries `cu_q[i]:cu_q[i + 1]` and keys `cu_k[i]:cu_k[i + 1]`, causal and aligned at their ends (the
last query sees the last key), which is the contract of FlashAttention's `flash_attn_varlen_func`.

Letters: T queries, K keys, H query heads, D head size.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.nn.functional as F

HALF = (torch.bfloat16, torch.float16)
_FLASH = {"flash_attn 3": "flash_attn_interface", "flash_attn 2": "flash_attn"}


@torch.compiler.disable  # its loop over sequences would be a graph of its own for every row
def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *max_seqlens: int,
    softmax_scale: float | None = None,
    **_: object,
) -> torch.Tensor:
    """[T, H, D] from [T, H, D] queries and [K, Hkv, D] keys and values. cu_seqlens: [sequences + 1] int32.
    max_seqlens: of queries and of keys."""
    tensors = (query, key, value)
    name = kernel(query.device.type, query.dtype)
    if name == "sdpa":
        return _loop(*tensors, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), softmax_scale)
    bounds = (cu_seqlens_q, cu_seqlens_k, *max_seqlens)
    if name == "torch varlen":
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.varlen import varlen_attn

        # cuDNN, which later versions of torch prefer, takes no grouped heads and aligns sequences at their beginning.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            is_grouped = query.shape[1] != key.shape[1]
            out = varlen_attn(*tensors, *bounds, scale=softmax_scale, window_size=(-1, 0), enable_gqa=is_grouped)  # type: ignore[arg-type]
        assert isinstance(out, torch.Tensor)
        return out
    found = _flash_function(name)(*tensors, *bounds, softmax_scale=softmax_scale, causal=True)
    return found[0] if isinstance(found, tuple) else found


@cache
def kernel(device_type: str, dtype: torch.dtype) -> str:
    """Which kernel is taken: FlashAttention 3, FlashAttention 2, torch's own copy of it, or one SDPA a sequence."""
    if device_type == "cuda" and dtype in HALF:
        for name, module in (*_FLASH.items(), ("torch varlen", "torch.nn.attention.varlen")):
            if find_spec(module) is not None:
                return name
    return "sdpa"


def _flash_function(name: str) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]] = import_module(
        _FLASH[name]
    ).flash_attn_varlen_func
    return function


def _loop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_bounds: Sequence[int],
    k_bounds: Sequence[int],
    scale: float | None,
) -> torch.Tensor:
    """One call a sequence."""
    outputs, is_grouped = [], query.shape[1] != key.shape[1]
    for (q, q_end), (k, k_end) in zip(pairwise(q_bounds), pairwise(k_bounds), strict=True):
        own, keys, values = (x.transpose(0, 1)[None] for x in (query[q:q_end], key[k:k_end], value[k:k_end]))
        rows, columns = q_end - q, k_end - k
        mask = None if rows == columns else _aligned_at_end(rows, columns, query.device)
        out = F.scaled_dot_product_attention(
            own, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


@lru_cache(maxsize=256)
def _aligned_at_end(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)
