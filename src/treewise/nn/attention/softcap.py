"""Attention with a score cap on CPU, in tiles: what the flash kernel does, with `softcap * tanh(score / softcap)`.

torch's CPU kernel has no cap. These two functions have its contract: a forward that also returns the log-sum-exp, and
a backward that takes an output and a log-sum-exp merged from several parts (Dao et al. 2022, FlashAttention,
arXiv:2205.14135, algorithms 1 and 4). Scores are held one tile at a time, in float32 or wider.

Letters: H query heads, G query heads of one key head, R rows, K keys, D head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from treewise.base.shapes import Float
from treewise.nn.attention.cascade import Attended, Visibility
from treewise.nn.attention.mask import LayerRule

# Rows and keys of a tile: with 32 heads, 32 MiB of float32 scores.
TILE_ROWS, TILE_KEYS = 256, 1024


def softcap_attention(
    query: Float[Tensor, "1 H R D"],
    key: Float[Tensor, "1 Hkv K D"],
    value: Float[Tensor, "1 Hkv K Dv"],
    visible: Visibility,
    rule: LayerRule,
) -> tuple[Float[Tensor, "1 H R Dv"], Float[Tensor, "1 H R"]]:
    """Attention of [1, H, R, D] queries over [1, H / G, K, D] keys and values, and its log-sum-exp ([1, H, R])."""
    query, key, value = _grouped(query, key, value)
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1])
    for rows in _ranges(query.shape[3], TILE_ROWS):
        shape = (*query.shape[:3], rows.stop - rows.start, 1)
        top, total = query.new_full(shape, -torch.inf), query.new_zeros(shape)
        sums = query.new_zeros(*shape[:-1], value.shape[-1])
        for keys in _keys_of(rows, key.shape[3], visible):
            scores = _scores(query, key, rows, keys, visible, rule)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            # A row that has seen no key yet must not compute inf - inf.
            safe = new_top.masked_fill(new_top == -torch.inf, 0.0)
            weights, shrink = torch.exp(scores - safe), torch.exp(top - safe)
            total = total * shrink + weights.sum(-1, keepdim=True)
            sums = sums * shrink + weights @ value[:, :, :, keys]
            top = new_top
        out[:, :, :, rows] = sums / total
        lse[:, :, :, rows] = (top + torch.log(total))[..., 0]
    return out.flatten(1, 2), lse.flatten(1, 2)


def softcap_attention_backward(
    grad: Float[Tensor, "1 H R Dv"], part: Attended, visible: Visibility, rule: LayerRule
) -> tuple[Float[Tensor, "1 H R D"], Float[Tensor, "1 Hkv K D"], Float[Tensor, "1 Hkv K Dv"]]:
    """Gradients of queries, keys and values in float32 or wider; `grad`: that of the output."""
    num_heads = part.query.shape[1]
    query, key, value = _grouped(part.query, part.key, part.value)
    shape = query.shape[:4]
    grad, out = grad.to(query.dtype).reshape(*shape, -1), part.out.to(query.dtype).reshape(*shape, -1)
    lse = part.lse.to(query.dtype).reshape(*shape, 1)
    delta = (grad * out).sum(-1, keepdim=True)
    query_grad, key_grad, value_grad = (torch.zeros_like(each) for each in (query, key, value))
    for rows in _ranges(query.shape[3], TILE_ROWS):
        for keys in _keys_of(rows, key.shape[3], visible):
            scores = _scores(query, key, rows, keys, visible, rule)
            weights = torch.exp(scores - lse[:, :, :, rows])
            row_grad, tile_key = grad[:, :, :, rows], key[:, :, :, keys]
            value_grad[:, :, :, keys] += (weights.transpose(-1, -2) @ row_grad).sum(2, keepdim=True)
            slope = 1 - torch.square(scores.masked_fill(scores == -torch.inf, 0.0) / _cap(rule))
            score_grad = weights * (row_grad @ value[:, :, :, keys].transpose(-1, -2) - delta[:, :, :, rows])
            score_grad = score_grad * slope * rule.scaling
            query_grad[:, :, :, rows] += score_grad @ tile_key
            key_grad[:, :, :, keys] += (score_grad.transpose(-1, -2) @ query[:, :, :, rows]).sum(2, keepdim=True)
    return query_grad.reshape(1, num_heads, *query.shape[3:]), key_grad[:, :, 0], value_grad[:, :, 0]


def _cap(rule: LayerRule) -> float:
    assert rule.softcap is not None
    return rule.softcap


def _grouped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[1, H / G, G, R, D] queries, and [1, H / G, 1, K, D] keys and values, in float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    num_groups = query.shape[1] // key.shape[1]
    return query.to(wide).unflatten(1, (-1, num_groups)), key.to(wide)[:, :, None], value.to(wide)[:, :, None]


def _scores(
    query: torch.Tensor, key: torch.Tensor, rows: slice, keys: slice, visible: Visibility, rule: LayerRule
) -> torch.Tensor:
    """[1, H / G, G, rows, keys] capped scores of one tile, -inf where hidden."""
    scores = query[:, :, :, rows] @ key[:, :, :, keys].transpose(-1, -2)
    scores = _cap(rule) * torch.tanh(scores * (rule.scaling / _cap(rule)))
    if visible.mask is not None:
        scores = scores + visible.mask[:, :, None, rows, keys]
    if visible.is_causal and keys.stop - 1 > rows.start:
        row = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        hidden = torch.arange(keys.start, keys.stop, device=scores.device) > row
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _keys_of(rows: slice, num_keys: int, visible: Visibility) -> Iterator[slice]:
    return _ranges(min(num_keys, rows.stop) if visible.is_causal else num_keys, TILE_KEYS)


def _ranges(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
