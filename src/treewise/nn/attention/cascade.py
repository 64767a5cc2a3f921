"""Tree attention on CPU by unmasked kernel calls whose partial results are merged by log-sum-exp.

Each row block (see `blocks`) takes one causal call over its own rows and one full call over the path above it; both
return their log-sum-exp, so the two results add up exactly. The backward calls the kernel's backward per part with the
*merged* output and log-sum-exp, which gives each part its exact share; nothing is saved but queries, own keys and
values, output and log-sum-exp. Gradients of keys that many blocks read are accumulated in float32, or in float64.
Layers that cap their scores take tiles of plain torch instead of the kernel (see `capped`).
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from treewise.nn.attention.gateway import GatewayRead, Rows, Slot, take
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.row_blocks import Block, Runs, plan_blocks
from treewise.nn.attention.softcap import capped_attention, capped_attention_backward

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cascade_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: TreeMask,
    rule: LayerRule,
    sinks: torch.Tensor | None = None,
    reads: tuple[GatewayRead, ...] = (),
    slot: Slot = 0,
) -> torch.Tensor:
    """Attention of [1, H, T, D] queries over their own [1, Hkv, T, D] keys and values and those read from gateways.

    Returns [1, H, T, D of the values]. Windows, chunks, sinks and score caps are exact.
    """
    num_groups = query.shape[1] // key.shape[1]
    if num_groups > 1 and not kernel_takes_groups():
        raise NotImplementedError("this torch's CPU attention kernel takes no grouped heads; use impl='reference'.")
    return _Cascade.apply(query, key, value, sinks, mask, rule, reads, slot)


@cache
def kernel_takes_groups() -> bool:
    """Whether the kernel and its backward take fewer key heads than query heads (torch 2.13 does)."""
    query, key = torch.zeros(1, 2, 1, 8, device="cpu"), torch.zeros(1, 1, 1, 8, device="cpu")
    try:
        out, lse = _forward_kernel(query, key, key, 0.0, False)
        grads = _backward_kernel(out, query, key, key, out, lse, 0.0, False)
    except RuntimeError:
        return False
    return grads[1].shape == key.shape


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: TreeMask,
        rule: LayerRule,
        reads: tuple[GatewayRead, ...],
        slot: Slot,
    ) -> torch.Tensor:
        blocks = _blocks(mask, rule, query.dtype)
        width = value.shape[3]
        keys, values = _Sources(key, value, reads, slot, query.shape[3]).tensors()
        out = query.new_empty(1, query.shape[2], query.shape[1], keys.width).transpose(1, 2)
        lse = query.new_empty(1, query.shape[1], query.shape[2], dtype=torch.promote_types(query.dtype, torch.float32))
        padded_query = _padded(query, keys.width)
        for block, tile in blocks:
            rows = slice(block.start, block.end)
            _attend(padded_query[:, :, rows], keys, values, block, tile, rule, out[:, :, rows], lse[:, :, rows])
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
            out *= torch.exp(lse - total).unsqueeze(-1)
            lse = total
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.blocks, ctx.rule, ctx.reads, ctx.slot = blocks, rule, reads, slot
        return out[..., :width]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        sources = _Sources(key, value, ctx.reads, ctx.slot, query.shape[3])
        keys, values = sources.tensors()
        query_width = query.shape[3]
        grad, query = _padded(grad, keys.width), _padded(query, keys.width)
        query_grad = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
        key_grads, value_grads = keys.zeros(), values.zeros()
        for block, tile in ctx.blocks:
            rows = slice(block.start, block.end)
            saved = (grad[:, :, rows], query[:, :, rows], out[:, :, rows], lse[:, :, rows])
            _attend_backward(saved, keys, values, block, tile, ctx.rule, query_grad[:, :, rows], key_grads, value_grads)
        sink_grad = None
        if sinks is not None:
            taken = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
            sink_grad = -(taken * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        sources.add_gateway_gradients(key_grads, value_grads)
        return (
            query_grad[..., :query_width],
            key_grads[-1][..., : key.shape[3]].to(key.dtype),
            value_grads[-1][..., : value.shape[3]].to(value.dtype),
            sink_grad,
            None,
            None,
            None,
            None,
        )


def _attend(
    query: torch.Tensor,
    keys: "_KeyAxis",
    values: "_KeyAxis",
    block: Block,
    tile: torch.Tensor | None,
    rule: LayerRule,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention of one block's rows, written into `out` and `lse`."""
    rest, rest_lse = _forward_part(query, keys.read(block.rest), values.read(block.rest), tile is None, tile, rule)
    if not block.full:
        out.copy_(rest)
        lse.copy_(rest_lse)
        return
    full, full_lse = _forward_part(query, keys.read(block.full), values.read(block.full), False, None, rule)
    total = torch.logaddexp(rest_lse, full_lse)
    lse.copy_(total)
    rest_share = torch.exp(rest_lse - total).unsqueeze(-1)
    full_share = torch.exp(full_lse - total).unsqueeze(-1)
    out.copy_(torch.addcmul(rest * rest_share, full, full_share))


def _attend_backward(
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    keys: "_KeyAxis",
    values: "_KeyAxis",
    block: Block,
    tile: torch.Tensor | None,
    rule: LayerRule,
    query_grad: torch.Tensor,
    key_grads: list[torch.Tensor],
    value_grads: list[torch.Tensor],
) -> None:
    """Gradients of one block's rows; those of keys and values are added to the accumulators."""
    grad, query, out, lse = saved
    parts = [(block.rest, tile is None, tile)] + ([(block.full, False, None)] if block.full else [])
    for number, (runs, is_causal, attn_mask) in enumerate(parts):
        part_query, part_key, part_value = _backward_part(
            grad, query, keys.read(runs), values.read(runs), out, lse, is_causal, attn_mask, rule
        )
        if number == 0:
            query_grad.copy_(part_query)
        else:
            query_grad.add_(part_query)
        keys.add(key_grads, runs, part_key)
        values.add(value_grads, runs, part_value)


def _forward_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    mask: torch.Tensor | None,
    rule: LayerRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of some rows over some keys."""
    if rule.softcap is not None:
        return capped_attention(query, key, value, is_causal, mask, rule.scaling, rule.softcap)
    return _forward_kernel(query, key, value, 0.0, is_causal, attn_mask=mask, scale=rule.scaling)


def _backward_part(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    mask: torch.Tensor | None,
    rule: LayerRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values from some rows over some keys."""
    if rule.softcap is not None:
        return capped_attention_backward(grad, query, key, value, out, lse, is_causal, mask, rule.scaling, rule.softcap)
    return _backward_kernel(grad, query, key, value, out, lse, 0.0, is_causal, attn_mask=mask, scale=rule.scaling)


class _KeyAxis:
    """Keys (or values) of a micro-batch as one axis: each gateway's rows in turn, then its own; never concatenated."""

    def __init__(self, parts: list[tuple[torch.Tensor, Rows, int]], width: int) -> None:
        self.parts, self.width = parts, width
        self.bounds = [0]
        for _, _, count in parts:
            self.bounds.append(self.bounds[-1] + count)

    def read(self, runs: Runs) -> torch.Tensor:
        """[1, Hkv, rows of the runs, D]; a view where it is one run of one tensor."""
        pieces = [_padded(take(tensor, rows), self.width) for tensor, rows in self._pieces(runs)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def zeros(self) -> list[torch.Tensor]:
        """Accumulators, one for each part."""
        made = []
        for tensor, _, count in self.parts:
            _, heads, _, _ = tensor.shape
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            made.append(torch.zeros(1, count, heads, self.width, dtype=dtype, device=tensor.device).transpose(1, 2))
        return made

    def add(self, accumulators: list[torch.Tensor], runs: Runs, grad: torch.Tensor) -> None:
        start = 0
        for number, low, high in self._split(runs):
            accumulators[number][:, :, low:high] += grad[:, :, start : start + high - low]
            start += high - low

    def _split(self, runs: Runs) -> list[tuple[int, int, int]]:
        """(part, first row, end row) of each run, cut where parts meet."""
        found = []
        for low, high in runs:
            for number in range(len(self.parts)):
                first, last = max(low, self.bounds[number]), min(high, self.bounds[number + 1])
                if first < last:
                    found.append((number, first - self.bounds[number], last - self.bounds[number]))
        return found

    def _pieces(self, runs: Runs) -> list[tuple[torch.Tensor, Rows]]:
        pieces: list[tuple[torch.Tensor, Rows]] = []
        for number, low, high in self._split(runs):
            tensor, rows, _ = self.parts[number]
            if isinstance(rows, slice):
                pieces.append((tensor, slice(rows.start + low, rows.start + high)))
            else:
                pieces.append((tensor, rows[low:high]))
        return pieces


class _Sources:
    """Where a layer's keys and values lie, and where the gradients of gateway rows go."""

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        reads: tuple[GatewayRead, ...],
        slot: Slot,
        query_width: int,
    ) -> None:
        self.key, self.value, self.reads, self.slot = key, value, reads, slot
        # The kernel wants one head size for all three; zeros change nothing.
        self.width = max(query_width, value.shape[3])

    def tensors(self) -> tuple[_KeyAxis, _KeyAxis]:
        own = slice(0, self.key.shape[2])
        keys = [(read.gateway.keys[self.slot], read.rows, read.num_rows) for read in self.reads]
        values = [(read.gateway.values[self.slot], read.rows, read.num_rows) for read in self.reads]
        return (
            _KeyAxis([*keys, (self.key, own, own.stop)], self.width),
            _KeyAxis([*values, (self.value, own, own.stop)], self.width),
        )

    def add_gateway_gradients(self, key_grads: list[torch.Tensor], value_grads: list[torch.Tensor]) -> None:
        for number, read in enumerate(self.reads):
            read.gateway.add_gradients(
                self.slot,
                read.rows,
                key_grads[number][..., : self.key.shape[3]],
                value_grads[number][..., : self.value.shape[3]],
            )


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor.shape[3]
    return tensor if missing == 0 else F.pad(tensor, (0, missing))


def _blocks(mask: TreeMask, rule: LayerRule, dtype: torch.dtype) -> list[tuple[Block, torch.Tensor | None]]:
    """The plan of a mask for a layer's rule, with its tiles as additive tensors; made once, used by all layers."""
    cache_key = ("blocks", rule.window, rule.chunk)
    if cache_key not in mask.cache:
        mask.cache[cache_key] = plan_blocks(mask, rule.window, rule.chunk)
    tile_key = ("tiles", rule.window, rule.chunk, dtype)
    if tile_key not in mask.cache:
        blocks = mask.cache[cache_key]
        mask.cache[tile_key] = [(block, _additive(block, dtype)) for block in blocks]
    return mask.cache[tile_key]


def _additive(block: Block, dtype: torch.dtype) -> torch.Tensor | None:
    if block.tile is None:
        return None
    seen = torch.from_numpy(block.tile)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[None, None]
