"""Tree attention on CPU by unmasked kernel calls whose partial results are merged by log-sum-exp.

Each row block (`mask.plan_blocks`) takes one causal call over its own rows and one full call over the path above; both
return their log-sum-exp, so the two results add up exactly. The backward calls the kernel's backward per part with the
*merged* output and log-sum-exp, which gives the exact gradient of each part; nothing is saved but queries, own keys and
values, output and log-sum-exp. Gradients of keys that many blocks read are accumulated in float32, or in float64.
Layers that cap their scores take tiles of plain torch instead of the kernel (see `softcap`).

Letters: T queries, R rows of a block, G gateway keys, K keys of a part, H query heads, Hkv key heads, D head size.
"""

from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.base import features
from treewise.base.shapes import Context, Float
from treewise.errors import ConfigError
from treewise.nn.attention.gateway import GatewayRead, LayerCall, take
from treewise.nn.attention.mask import LayerRule, Ranges, TreeMask, plan_blocks
from treewise.nn.platform.tensors import has_data
from treewise.nn.platform.versions import part_of_torch

_forward_kernel = part_of_torch("ops.aten._scaled_dot_product_flash_attention_for_cpu")
_backward_kernel = part_of_torch("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")


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
    """Attention of [1, H, T, D] queries over their own [1, Hkv, T, D] keys and values and those read from gateways.

    Returns [1, H, T, D of the values]. Windows, chunks, sinks ([H]) and score caps are exact.

    Raises:
        ConfigError: tensors that are not on the CPU, or grouped heads where this torch's kernel takes none.
    """
    if query.device.type not in ("cpu", "meta"):  # meta: tensors without data, whose sizes alone count
        raise ConfigError(
            f"attention='cascade' runs on the CPU, and the model is on {query.device}; use attention='auto'."
        )
    if query.shape[1] != key.shape[1] and not kernel_takes_groups():
        raise ConfigError(
            f"attention='cascade': the CPU kernel of torch {torch.__version__} takes no grouped heads (2.13 does); use "
            "attention='reference'."
        )
    return _Cascade.apply(query, key, value, sinks, mask, rule, reads, call)


@cache
def kernel_takes_groups() -> bool:
    """Whether the kernel and its backward take fewer key heads than query heads (torch 2.13 does)."""
    query, key = torch.zeros(1, 2, 1, 8, device="cpu"), torch.zeros(1, 1, 1, 8, device="cpu")
    try:
        out, lse = _forward_kernel(query, key, key)
        grads = _backward_kernel(out, query, key, key, out, lse, dropout_p=0.0, is_causal=False)
    except RuntimeError:
        return False
    return grads[1].shape == key.shape


def num_key_rows(mask: TreeMask, _: torch.device) -> int:
    """Key rows that one layer without a window reads in a forward of a micro-batch: the keys of all its blocks."""
    blocks = mask.derived(plan_blocks, None, None)
    return sum(end - start for block in blocks for start, end in block.full + block.rest)


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: TreeMask,
        rule: LayerRule,
        reads: tuple[GatewayRead, ...],
        call: LayerCall,
    ) -> torch.Tensor:
        sources = _Sources(key, value, reads, call, query.shape[3])
        only_largest = not has_data(query)  # after which no other block takes more memory
        blocks = mask.derived(_blocks, rule.window, rule.chunk, query.dtype, query.device, sources.bounds, only_largest)
        out = query.new_empty(1, query.shape[2], query.shape[1], sources.width).transpose(1, 2)
        lse = query.new_empty(1, query.shape[1], query.shape[2], dtype=torch.promote_types(query.dtype, torch.float32))
        padded_query = _padded(query, sources.width)
        for rows, parts in blocks:
            row_query, row_out, row_lse = padded_query[:, :, rows], out[:, :, rows], lse[:, :, rows]
            results = [_forward_part(row_query, *sources.read(pieces), visible, rule) for pieces, visible in parts]
            rest, rest_lse = results[0]
            if len(results) == 1:
                row_out.copy_(rest)
                row_lse.copy_(rest_lse)
                continue
            full, full_lse = results[1]
            torch.logaddexp(rest_lse, full_lse, out=row_lse)
            # exp(lse of the rest - total) is the sigmoid of the difference.
            weight = torch.sub(rest_lse, full_lse).sigmoid_().unsqueeze(-1)
            if out.dtype == full.dtype == weight.dtype:
                torch.lerp(full, rest, weight, out=row_out)
            else:  # a weight in half precision would round once more
                row_out.copy_(torch.lerp(full.to(weight.dtype), rest.to(weight.dtype), weight))
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
            out *= torch.exp(lse - total).unsqueeze(-1)
            lse = total
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.blocks, ctx.rule, ctx.reads, ctx.call = blocks, rule, reads, call
        return out[..., : value.shape[3]]

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        sources = _Sources(key, value, ctx.reads, ctx.call, query.shape[3])
        gradients = _KeyGradients(sources)
        query_width = query.shape[3]
        grad, query = _padded(grad, sources.width), _padded(query, sources.width)
        query_grad = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
        for rows, parts in ctx.blocks:
            part_grads = []
            row_grad, row_query, row_out, row_lse = (tensor[:, :, rows] for tensor in (grad, query, out, lse))
            for pieces, visible in parts:
                part = Attended(row_query, *sources.read(pieces), row_out, row_lse)
                part_grad, *key_value_grads = _backward_part(row_grad, part, visible, ctx.rule)
                part_grads.append(part_grad)
                gradients.add(pieces, *key_value_grads)
            if len(part_grads) == 2:
                torch.add(*part_grads, out=query_grad[:, :, rows])
            else:
                query_grad[:, :, rows] = part_grads[0]
        sink_grad = None
        if sinks is not None:
            taken = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
            sink_grad = -(taken * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        key_grad, value_grad = gradients.finish()
        return query_grad[..., :query_width], key_grad, value_grad, sink_grad, None, None, None, None


class Attended(NamedTuple):
    """What the backward takes. query: [1, H, R, D]. key, value: [1, H / G, K, D], with another D for values if need be.
    out ([1, H, R, D of the values]), lse ([1, H, R]): of all parts that the rows attend to; these keys may be one."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Visibility(NamedTuple):
    """Which keys the rows of one part see. is_causal: row r sees keys 0 to r. mask: [1, 1, R, K], 0 or -inf, added to
    the scores; every row sees some key."""

    is_causal: bool = False
    mask: torch.Tensor | None = None


def _forward_part(
    query: Float[Tensor, "1 H R D"],
    key: Float[Tensor, "1 Hkv K D"],
    value: Float[Tensor, "1 Hkv K D"],
    visible: Visibility,
    rule: LayerRule,
) -> tuple[Float[Tensor, "1 H R D"], Float[Tensor, "1 H R"]]:
    """Output [1, H, R, D] and log-sum-exp [1, H, R] of some rows over some keys."""
    if rule.softcap is not None:
        out, lse = features.softcap.softcap_attention(query, key, value, visible, rule)
        return out, lse
    return _forward_kernel(query, key, value, is_causal=visible.is_causal, attn_mask=visible.mask, scale=rule.scaling)


def _backward_part(
    grad: torch.Tensor, part: Attended, visible: Visibility, rule: LayerRule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values from some rows over some keys.

    Measured with torch 2.13 on a CPU with AMX, the kernel's bfloat16 backward takes 1.1 to 6 times as long as its
    float32 backward (its forward 0.4), except with large heads and many rows.
    """
    if rule.softcap is not None:
        query_grad, key_grad, value_grad = features.softcap.softcap_attention_backward(grad, part, visible, rule)
        return query_grad, key_grad, value_grad
    mask = visible.mask
    if grad.dtype in (torch.bfloat16, torch.float16) and (grad.shape[3] < 128 or grad.shape[2] < 256):
        grad, part = grad.float(), Attended(*(tensor.float() for tensor in part))
        mask = None if mask is None else mask.float()
    return _backward_kernel(grad, *part, dropout_p=0.0, is_causal=visible.is_causal, attn_mask=mask, scale=rule.scaling)


class _Piece(NamedTuple):
    """Rows [low, high) of one source of keys: of what is read from a gateway, or of the micro-batch's own."""

    source: int
    low: int
    high: int


# One kernel call of a block: the pieces that make up its keys, in order, and which of these its rows see.
_Part = tuple[list[_Piece], Visibility]
_Rows = tuple[slice, list[_Part]]  # of a block, and its parts


class _Sources:
    """Keys and values of a layer, never concatenated: those read from each gateway, then its own.

    keys, values: [1, Hkv, rows, D] of each source. bounds: where each begins on the key axis, and its end.
    """

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        reads: tuple[GatewayRead, ...],
        call: LayerCall,
        query_width: int,
    ) -> None:
        self.key, self.value, self.reads, self.call = key, value, reads, call
        # The kernel wants one head size for all three; zeros change nothing.
        self.width = max(query_width, value.shape[3])
        keys = [*(take(read.gateway.keys[call], read.rows) for read in reads), key]
        values = [*(take(read.gateway.values[call], read.rows) for read in reads), value]
        self.keys, self.values = ([_padded(source, self.width) for source in of] for of in (keys, values))
        self.bounds = tuple(accumulate((keys.shape[2] for keys in self.keys), initial=0))

    def read(self, pieces: list[_Piece]) -> tuple[Float[Tensor, "1 Hkv K D"], Float[Tensor, "1 Hkv K D"]]:
        """Keys and values [1, Hkv, rows of the pieces, D]; views where it is one piece."""
        keys = [self.keys[source].narrow(2, low, high - low) for source, low, high in pieces]
        values = [self.values[source].narrow(2, low, high - low) for source, low, high in pieces]
        return (keys[0], values[0]) if len(pieces) == 1 else (torch.cat(keys, dim=2), torch.cat(values, dim=2))


class _KeyGradients:
    """Gradients of all keys and values of a layer, summed over blocks in float32 or wider, in the order of memory of
    what the projections take.
    """

    def __init__(self, sources: _Sources) -> None:
        self.sources = sources
        self.of_keys, self.of_values = (
            [
                torch.zeros(
                    source.transpose(1, 2).shape,
                    dtype=torch.promote_types(source.dtype, torch.float32),
                    device=source.device,
                ).transpose(1, 2)
                for source in of
            ]
            for of in (sources.keys, sources.values)
        )

    def add(self, pieces: list[_Piece], key_grad: torch.Tensor, value_grad: torch.Tensor) -> None:
        """Adds those of one part."""
        start = 0
        for source, low, high in pieces:
            self.of_keys[source].narrow(2, low, high - low).add_(key_grad.narrow(2, start, high - low))
            self.of_values[source].narrow(2, low, high - low).add_(value_grad.narrow(2, start, high - low))
            start += high - low

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands gateways the gradients of their rows; returns those of the layer's own keys and values."""
        key, value = self.sources.key, self.sources.value
        key_grads = [source_grad[..., : key.shape[3]] for source_grad in self.of_keys]
        value_grads = [source_grad[..., : value.shape[3]] for source_grad in self.of_values]
        for read, key_grad, value_grad in zip(self.sources.reads, key_grads, value_grads, strict=False):
            read.gateway.add_gradients(self.sources.call, read.rows, key_grad, value_grad)
        return key_grads[-1].to(key.dtype), value_grads[-1].to(value.dtype)


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor.shape[3]
    return tensor if missing == 0 else F.pad(tensor, (0, missing))


def _blocks(
    mask: TreeMask,
    window: int | None,
    chunk: int | None,
    dtype: torch.dtype,
    device: torch.device,
    bounds: tuple[int, ...],
    only_largest: bool,
) -> list[_Rows]:
    """The rows of each block of a mask, and its parts: the keys that some rows see, then those that all see.

    only_largest: the block with most pairs alone.
    """
    blocks = []
    for block in mask.derived(plan_blocks, window, chunk):
        tile = None  # added to scores ([1, 1, R, K])
        if block.tile is not None:
            seen = torch.from_numpy(block.tile).to(device)
            tile = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[None, None]
        parts = [(_pieces(block.rest, bounds), Visibility(is_causal=block.is_causal, mask=tile))]
        if block.full:
            parts.append((_pieces(block.full, bounds), Visibility()))
        blocks.append((slice(block.start, block.end), parts))
    return [max(blocks, key=_num_pairs)] if only_largest else blocks


def _num_pairs(block: _Rows) -> int:
    rows, parts = block
    return (rows.stop - rows.start) * sum(piece.high - piece.low for pieces, _ in parts for piece in pieces)


def _pieces(ranges: Ranges, bounds: tuple[int, ...]) -> list[_Piece]:
    """Ranges on the key axis, cut where sources meet."""
    pieces = []
    for low, high in ranges:
        for source, (first, last) in enumerate(pairwise(bounds)):
            if max(low, first) < min(high, last):
                pieces.append(_Piece(source, max(low, first) - first, min(high, last) - first))
    return pieces
