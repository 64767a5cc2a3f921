"""The specification: a dense mask and a plain softmax, on any device, in any dtype.

It supports everything that a layer may ask for. The other implementations are tested against it; it is what to read
first and what to run when in doubt. Memory is quadratic in the micro-batch.
"""

import torch
from torch import Tensor

from treewise.base.shapes import Bool, Float
from treewise.nn.attention.gateway import GatewayRead, LayerCall, extend
from treewise.nn.attention.mask import LayerRule, TreeMask


def visible(mask: TreeMask, window: int | None, chunk: int | None, device: torch.device) -> Bool[Tensor, "T K"]:
    """[T, K] bool: which query sees which key under the tree and a layer's window or chunks."""
    lo_K, hi_K, depth_K = mask.on(device)
    query_T = torch.arange(mask.num_queries, device=device)[:, None]
    seen_TK = (lo_K[None] <= query_T) & (query_T < hi_K[None])
    depth_T = depth_K[mask.num_gateway_keys :, None]
    if window is not None:
        seen_TK &= depth_T - depth_K[None] < window
    if chunk is not None:
        seen_TK &= depth_T // chunk == depth_K[None] // chunk
    return seen_TK


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
    """`reference_attention` of a micro-batch's own tokens behind the rows that it reads from gateways."""
    return reference_attention(query, *extend(key, value, reads, call), mask, rule, sinks)


def reference_attention(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 Hkv K D"],
    value: Float[Tensor, "1 Hkv K Dv"],
    mask: TreeMask,
    rule: LayerRule,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "1 H T Dv"]:
    """Attention of [1, H, T, D] queries over [1, Hkv, K, D] keys and values; returns [1, H, T, D of the values].

    `sinks` ([H]) are extra logits that take probability and give nothing (gpt-oss). Scores are accumulated in float32,
    in float64 for float64 inputs.
    """
    seen_TK = mask.derived(visible, rule.window, rule.chunk, query.device)
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1:
        key = key.repeat_interleave(num_groups, dim=1)
        value = value.repeat_interleave(num_groups, dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query, key.transpose(2, 3)).to(wide) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen_TK, -torch.inf)
    if sinks is not None:
        sink_column = sinks.to(wide)[None, :, None, None].expand(-1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, sink_column], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return torch.matmul(probabilities.to(value.dtype), value)
