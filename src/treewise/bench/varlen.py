"""Attention of sequences without padding, for the baselines: the fastest kernel that is installed and fits the device.

FlashAttention's packages share one function, `flash_attn_varlen_func`, and its keywords; torch's `varlen_attn` has
others in every release. So functions are looked for, not packages (flash-attn-4 brings a folder `flash_attn` without
the function of FlashAttention 2), and arguments are given by name as signatures have them. Which kernel ran stands
beside every figure.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.errors import ConfigError
from treewise.nn.platform.card import capability_of

logger = logging.getLogger("treewise")

HALF = (torch.bfloat16, torch.float16)
# The fastest first: the module with the function, and the compute capabilities (major) that it has kernels for.
FLASH = {
    "flash_attn 3": ("flash_attn_interface", (9,)),
    "flash_attn 4": ("flash_attn.cute", (9, 10, 11)),
    "flash_attn 2": ("flash_attn", (8, 9, 10, 11, 12)),
}
OLDEST = 8  # for torch's own copy
# Kernels for Hopper and newer cards, on which FlashAttention 2 is no baseline that a careful user has.
NEWER, HOPPER = ("flash_attn 3", "flash_attn 4"), 9
TORCH, LOOP = "torch varlen", "sdpa"


@torch.compiler.disable  # its loop over sequences would be a graph of its own for every row
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *max_seqlens: int,
    softmax_scale: float | None = None,
    **_: object,
) -> Tensor:
    """[T, H, D] from [T, H, D] queries and [K, Hkv, D] keys and values. cu_seqlens: [sequences + 1] int32.
    max_seqlens: of queries and of keys.

    Sequence `i` has queries `cu_q[i]:cu_q[i + 1]` and keys `cu_k[i]:cu_k[i + 1]`, causal and aligned at their ends (the
    last query sees the last key), which is the contract of FlashAttention's `flash_attn_varlen_func`.
    """
    tensors = (query, key, value)
    name = kernel(query.device.type, query.dtype)
    if name == LOOP:
        return _loop(*tensors, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), softmax_scale)
    if name == TORCH:
        return _by_torch(*tensors, cu_seqlens_q, cu_seqlens_k, *max_seqlens, scale=softmax_scale)
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), max_seqlens, strict=True))
    found = flash_function(name)(*tensors, **bounds, **longest, softmax_scale=softmax_scale, causal=True)  # type: ignore[misc]
    return found[0] if isinstance(found, tuple) else found


@cache
def kernel(device_type: str, dtype: torch.dtype) -> str:
    """Which kernel is taken: FlashAttention 3, 4 or 2, torch's own copy of 2, or one SDPA a sequence."""
    if device_type != "cuda" or dtype not in HALF:
        return LOOP
    capability = capability_of(torch.device(device_type))
    major = None if capability is None else capability[0]  # on ROCm what is installed counts
    for name, (_, majors) in FLASH.items():
        if (major is None or major in majors) and flash_function(name) is not None:
            return name
    return LOOP if _varlen_attn() is None or (major is not None and major < OLDEST) else TORCH


@cache
def flash_function(name: str) -> Callable[..., Any] | None:
    """`flash_attn_varlen_func` of a name of `FLASH`; None where it is not installed, or broken, which is a warning."""
    module, _ = FLASH[name]
    try:
        return getattr(import_module(module), "flash_attn_varlen_func", None)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return None
        why: Exception = error
    except Exception as error:  # whatever a broken installation raises is what the user is to see
        why = error
    first, *_ = str(why).splitlines() or [""]
    logger.warning("%s is installed and cannot be used: %s: %s", name, type(why).__name__, first)
    return None


def _varlen_attn() -> Callable[..., Any] | None:
    try:
        return getattr(import_module("torch.nn.attention.varlen"), "varlen_attn", None)
    except ModuleNotFoundError:
        return None


def _by_torch(query: Tensor, key: Tensor, value: Tensor, *bounds: Tensor | int, scale: float | None) -> Tensor:
    """torch's `varlen_attn`: 2.10 knows `is_causal` and neither scales nor windows, 2.11 windows, 2.12 grouped heads by
    name (before, its kernel takes them as they are).

    Raises:
        ConfigError: it has neither `window_size` nor `is_causal`.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    function = _varlen_attn()
    assert function is not None
    known, given = inspect.signature(function).parameters, dict[str, object]()
    if "window_size" in known:
        given["window_size"] = (-1, 0)
    elif "is_causal" in known:
        given["is_causal"] = True
    else:
        raise ConfigError(f"varlen_attn of torch {torch.__version__} has no causal attention that is known here.")
    if "scale" in known:
        given["scale"] = scale
    elif scale is not None:
        query = query * (scale * query.shape[2] ** 0.5)
    if "enable_gqa" in known:
        given["enable_gqa"] = query.shape[1] != key.shape[1]
    # cuDNN, which later versions of torch prefer, takes no grouped heads and aligns sequences at their beginning.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = function(query, key, value, *bounds, **given)
    assert isinstance(out, Tensor)
    return out


def _loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_bounds: Sequence[int],
    k_bounds: Sequence[int],
    scale: float | None,
) -> Tensor:
    """Attention of each sequence of a packed row by a call of its own."""
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
def _aligned_at_end(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)
