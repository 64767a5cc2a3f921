"""Attention by cuDNN Frontend's `flex_attention`: kernels in CuTe DSL whose mask is intervals of keys for each query.

A query of a tree sees its path. Since siblings lie heaviest first, the rows of a path are few runs: one more than the
light edges on it, and the keys of gateways before them. A run is an interval of keys, so no function of the mask is
compiled, no block is classified pair by pair, and a window or a chunk cuts the runs. The package makes a plan of its
own from them once in a micro-batch for each kind of layer, for which the host waits (twice where there are gradients),
and takes it in every layer. The log-sum-exp has a gradient, so sinks are exact; score caps it does not have. It has run
on no GPU yet.

Letters: T queries, K keys (gateway keys first), R runs of all queries, H query heads, D head size, F ends of intervals
(`nfunc` of the package).
"""

from collections.abc import Hashable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treewise.base.shapes import Float, Int
from treewise.errors import ConfigError
from treewise.nn.attention.gateway import GatewayRead, LayerCall, extend
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.needs import require_of_call
from treewise.nn.platform.tensors import to_device
from treewise.nn.platform.versions import installed_version
from treewise.tree.prefix_merge import concatenated_ranges

PACKAGE, NAMES = "cudnn.flex_attention", ("create_mask_plan", "flex_attn_func")


def attend(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 Hkv T D"],
    value: Float[Tensor, "1 Hkv T Dv"],
    mask: TreeMask,
    rule: LayerRule,
    sinks: Float[Tensor, " H"] | None = None,
    reads: tuple[GatewayRead, ...] = (),
    call: LayerCall = 0,
) -> Float[Tensor, "1 H T Dv"]:
    """Attention of a micro-batch's own tokens behind the rows that it reads from gateways.

    Raises:
        ConfigError, UnsupportedModelError: see `needs.Needs.refusal`.
    """
    require_of_call(mask, "cudnn", query, value, rule, sinks)
    return cudnn_attention_tree(query, *extend(key, value, reads, call), mask, rule, sinks)


def cudnn_attention_tree(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 Hkv K D"],
    value: Float[Tensor, "1 Hkv K Dv"],
    mask: TreeMask,
    rule: LayerRule,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "1 H T Dv"]:
    """Attention of [1, H, T, D] queries over [1, Hkv, K, D] keys and values, as `reference_attention`."""
    query, key, value = (_token_by_token(each) for each in (query, key, value))
    plan = _plan(query, key, value, mask, rule)
    options: dict[str, Any] = {
        "softmax_scale": rule.scaling,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if sinks is None:
        return package().flex_attn_func(query, key, value, mask_plan=plan, **options).transpose(1, 2)
    out, lse = package().flex_attn_func(query, key, value, mask_plan=plan, return_lse=True, **options)
    without_sink = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None]).transpose(1, 2)  # [1, T, H]
    return (out * without_sink[..., None]).to(value.dtype).transpose(1, 2)


def _token_by_token(heads: Tensor) -> Tensor:
    """[1, T, H, D] of [1, H, T, D]; a view where the numbers of a head lie side by side."""
    rows = heads.transpose(1, 2)
    return rows if rows.stride(3) == 1 else rows.contiguous()


@cache
def package() -> Any:
    """`cudnn.flex_attention`.

    Raises:
        ConfigError: it cannot be imported, or lacks what we call: its interface is declared experimental.
    """
    try:
        found = import_module(PACKAGE)
        missing = [name for name in NAMES if not hasattr(found, name)]
    except Exception as error:  # whatever a broken installation raises is what the user is to see
        missing, why = [PACKAGE], error
        raise ConfigError(f"{_broken(missing)} ({type(why).__name__}: {why})") from error
    if missing:
        raise ConfigError(_broken(missing))
    return found


def _broken(missing: list[str]) -> str:
    version = installed_version("nvidia-cudnn-frontend")
    return f"attention='cudnn': nvidia-cudnn-frontend {version} has no {', '.join(missing)}; use attention='flex'."


# -- the mask as intervals --------------------------------------------------------------------------------------------


def _plan(query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, rule: LayerRule) -> Any:
    """The package's plan for layers of this kind, made once per micro-batch."""
    plans = mask.derived(_no_plans)
    shapes = query.shape[2:], key.shape[2:], value.shape[3]
    kind = (rule.window, rule.chunk, *shapes, query.dtype, query.device, torch.is_grad_enabled())
    if kind not in plans:
        ends = mask.derived(interval_ends, rule.window, rule.chunk)
        on_device = to_device(ends, query.device, torch.int32)[None].contiguous()
        plans[kind] = package().create_mask_plan(on_device, query, key, value, build_backward=torch.is_grad_enabled())
    return plans[kind]


def _no_plans(_: TreeMask) -> dict[Hashable, Any]:
    return {}


def interval_ends(mask: TreeMask, window: int | None, chunk: int | None) -> Int[np.ndarray, "F T"]:
    """The keys that each query sees, as intervals [0, F0), [F1, F2), [F3, F4), ..., ascending; F is odd.

    Queries with fewer intervals than others end with empty ones.
    """
    query_R, low_R, high_R = visible_runs(mask, window, chunk)
    # The first interval begins at key 0, or is empty.
    first_R = np.diff(query_R, prepend=-1) != 0
    number_R = np.arange(len(query_R)) - np.maximum.accumulate(np.where(first_R, np.arange(len(query_R)), 0))
    begins_late_T = np.zeros(mask.num_queries, dtype=np.int64)
    begins_late_T[query_R[first_R]] = low_R[first_R] > 0
    number_R = number_R + begins_late_T[query_R]
    ends = np.zeros((2 * int(number_R.max(initial=0)) + 1, mask.num_queries), dtype=np.int64)
    ends[2 * number_R, query_R] = high_R
    ends[2 * number_R[number_R > 0] - 1, query_R[number_R > 0]] = low_R[number_R > 0]
    return np.maximum.accumulate(ends, axis=0).astype(np.int32)


def visible_runs(mask: TreeMask, window: int | None, chunk: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[R] int64 each: query, first key and end of every run of keys that a query sees, by query and then by key.

    Depths are consecutive within a run (adjacent keys that are both seen and are not parent and child begin another),
    so a window or a chunk leaves a part of it that is a run, too.
    """
    lo_K, hi_K, depth_K = (each.astype(np.int64) for each in (mask.lo, mask.hi, mask.key_depth))
    # A run begins at a key for the queries that see it and not the key before it, and ends where they see no next one.
    is_child_K = np.diff(depth_K, prepend=depth_K[:1] - 2) == 1
    query_R, low_R = _seen_alone(lo_K, hi_K, np.roll(lo_K, 1), np.roll(hi_K, 1), is_child_K)
    follows_K = np.roll(is_child_K, -1)
    follows_K[-1:] = False
    ends_query_R, last_R = _seen_alone(lo_K, hi_K, np.roll(lo_K, -1), np.roll(hi_K, -1), follows_K)
    assert np.array_equal(query_R, ends_query_R)
    high_R = last_R + 1
    depth_R, first_R, low, high = depth_K[mask.num_gateway_keys :][query_R], depth_K[low_R], low_R, high_R
    if window is not None:
        low = low_R + (depth_R - window + 1 - first_R).clip(0)
    if chunk is not None:
        begin_R = depth_R // chunk * chunk - first_R  # of the query's chunk, in keys of the run
        low, high = np.maximum(low, low_R + begin_R), np.minimum(high, low_R + begin_R + chunk)
    is_left = low < high
    return query_R[is_left], low[is_left], high[is_left]


def _seen_alone(
    lo_K: np.ndarray, hi_K: np.ndarray, other_lo_K: np.ndarray, other_hi_K: np.ndarray, is_joined_K: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys, by query and then by key, where a query sees the key and not its neighbour; or sees both, and
    they are not joined."""
    other_lo_K, other_hi_K = np.where(is_joined_K, other_lo_K, 0), np.where(is_joined_K, other_hi_K, 0)
    # [lo, hi) without [other lo, other hi): what is before, and what is behind it.
    is_apart_K = (other_hi_K <= lo_K) | (hi_K <= other_lo_K) | (other_hi_K <= other_lo_K)
    before_end_K = np.where(is_apart_K, hi_K, np.clip(other_lo_K, lo_K, hi_K))
    behind_K = np.where(is_apart_K, hi_K, np.clip(other_hi_K, lo_K, hi_K))
    first = np.concatenate([lo_K, behind_K])
    count = np.concatenate([before_end_K - lo_K, hi_K - behind_K]).clip(0)
    query, key = concatenated_ranges(first, count), np.repeat(np.tile(np.arange(len(lo_K)), 2), count)
    order = np.lexsort((key, query))
    return query[order], key[order]
