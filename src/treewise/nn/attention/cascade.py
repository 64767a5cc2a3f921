"""Tree attention on CPU by unmasked kernel calls whose partial results are merged by log-sum-exp.

Each row block (see `row_blocks`) takes one causal call over its own rows and one full call over the path above it; both
return their log-sum-exp, so the two results add up exactly. The backward calls the kernel's backward per part with the
*merged* output and log-sum-exp, which gives the exact gradient of each part; nothing is saved but queries, own keys and
values, output and log-sum-exp. Gradients of keys that many blocks read are accumulated in float32, or in float64.
Layers that cap their scores take tiles of plain torch instead of the kernel (see `softcap`).

Letters: T queries, R rows of a block, G gateway keys, K keys of a part, H query heads, Hkv key heads, D head size.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.errors import ConfigError
from treewise.nn.attention.gateway import GatewayRead, LayerCall, RowIndex, take
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.row_blocks import Block, Ranges, plan_blocks
from treewise.nn.attention.softcap import Attended, Visibility, softcap_attention, softcap_attention_backward
from treewise.shapes import Float

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def cascade_attention(
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
    if query.device.type != "cpu":
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


def is_available(device_type: str) -> bool:
    """Whether `attention="auto"` may take this implementation on a type of device."""
    return device_type == "cpu" and kernel_takes_groups()


def num_key_rows(mask: TreeMask, _: torch.device) -> int:
    """Key rows that one layer without a window reads in a forward of a micro-batch: the keys of all its blocks."""
    blocks = mask.derived(plan_blocks, None, None)
    return sum(end - start for block in blocks for start, end in block.full + block.rest)


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
        call: LayerCall,
    ) -> torch.Tensor:
        blocks = mask.derived(_blocks, rule.window, rule.chunk, query.dtype)
        sources = _Sources(key, value, reads, call, query.shape[3])
        out = query.new_empty(1, query.shape[2], query.shape[1], sources.width).transpose(1, 2)
        lse = query.new_empty(1, query.shape[1], query.shape[2], dtype=torch.promote_types(query.dtype, torch.float32))
        padded_query = _padded(query, sources.width)
        for block, tile in blocks:
            rows = slice(block.start, block.end)
            _attend(padded_query[:, :, rows], sources, block, tile, rule, out[:, :, rows], lse[:, :, rows])
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
            out *= torch.exp(lse - total).unsqueeze(-1)
            lse = total
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.blocks, ctx.rule, ctx.reads, ctx.call = blocks, rule, reads, call
        return out[..., : value.shape[3]]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        sources = _Sources(key, value, ctx.reads, ctx.call, query.shape[3])
        gradients = _KeyGradients(sources)
        query_width = query.shape[3]
        grad, query = _padded(grad, sources.width), _padded(query, sources.width)
        query_grad = query.new_empty(query.transpose(1, 2).shape).transpose(1, 2)
        for block, tile in ctx.blocks:
            rows = slice(block.start, block.end)
            part_grads = []
            for ranges, visible in _parts(block, tile):
                part = Attended(query[:, :, rows], *sources.read(ranges), out[:, :, rows], lse[:, :, rows])
                part_grad, *key_value_grads = _backward_part(grad[:, :, rows], part, visible, ctx.rule)
                part_grads.append(part_grad)
                gradients.add(ranges, *key_value_grads)
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


def _parts(block: Block, tile: torch.Tensor | None) -> list[tuple[Ranges, Visibility]]:
    """The kernel calls of a block: the keys of each, and which of them its rows see."""
    rest = (block.rest, Visibility(is_causal=block.is_causal, mask=tile))
    return [rest, (block.full, Visibility())] if block.full else [rest]


def _attend(
    query: Float[Tensor, "1 H R D"],
    sources: "_Sources",
    block: Block,
    tile: torch.Tensor | None,
    rule: LayerRule,
    out: Float[Tensor, "1 H R D"],
    lse: Float[Tensor, "1 H R"],
) -> None:
    """Writes the output and log-sum-exp of one block's rows into views of them."""
    results = [_forward_part(query, *sources.read(ranges), visible, rule) for ranges, visible in _parts(block, tile)]
    rest, rest_lse = results[0]
    if len(results) == 1:
        out.copy_(rest)
        lse.copy_(rest_lse)
        return
    full, full_lse = results[1]
    torch.logaddexp(rest_lse, full_lse, out=lse)
    # exp(lse of the rest - total) is the sigmoid of the difference.
    weight = torch.sub(rest_lse, full_lse).sigmoid_().unsqueeze(-1)
    if out.dtype == full.dtype == weight.dtype:
        torch.lerp(full, rest, weight, out=out)
    else:  # a weight in half precision would round once more
        out.copy_(torch.lerp(full.to(weight.dtype), rest.to(weight.dtype), weight))


def _forward_part(
    query: Float[Tensor, "1 H R D"],
    key: Float[Tensor, "1 Hkv K D"],
    value: Float[Tensor, "1 Hkv K D"],
    visible: Visibility,
    rule: LayerRule,
) -> tuple[Float[Tensor, "1 H R D"], Float[Tensor, "1 H R"]]:
    """Output [1, H, R, D] and log-sum-exp [1, H, R] of some rows over some keys."""
    if rule.softcap is not None:
        return softcap_attention(query, key, value, visible, rule)
    return _forward_kernel(query, key, value, is_causal=visible.is_causal, attn_mask=visible.mask, scale=rule.scaling)


def _backward_part(
    grad: torch.Tensor, part: Attended, visible: Visibility, rule: LayerRule
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values from some rows over some keys."""
    if rule.softcap is not None:
        return softcap_attention_backward(grad, part, visible, rule)
    mask = visible.mask
    if _is_backward_wide(grad):
        grad, part = grad.float(), Attended(*(each.float() for each in part))
        mask = None if mask is None else mask.float()
    return _backward_kernel(grad, *part, dropout_p=0.0, is_causal=visible.is_causal, attn_mask=mask, scale=rule.scaling)


def _is_backward_wide(grad: Float[Tensor, "1 H R D"]) -> bool:
    """Whether the backward of a part in half precision runs in float32.

    Measured with torch 2.13 on a CPU with AMX, the kernel's bfloat16 backward takes 1.1 to 6 times as long as its
    float32 backward (its forward 0.4), except with large heads and many rows.
    """
    return grad.dtype in (torch.bfloat16, torch.float16) and (grad.shape[3] < 128 or grad.shape[2] < 256)


class _KeyAxis:
    """Keys (or values) of a micro-batch as one axis: each gateway's rows in turn, then its own; never concatenated."""

    def __init__(self, parts: list[tuple[torch.Tensor, RowIndex, int]], width: int) -> None:
        self.parts, self.width = parts, width
        self.bounds = [0]
        for _, _, count in parts:
            self.bounds.append(self.bounds[-1] + count)

    def read(self, ranges: Ranges) -> Float[Tensor, "1 Hkv K D"]:
        """[1, Hkv, rows of the ranges, D]; a view where it is one range of one tensor."""
        pieces = [_padded(take(tensor, rows), self.width) for tensor, rows in self._pieces(ranges)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def zeros(self) -> list[torch.Tensor]:
        """Accumulators [1, Hkv, rows, D], one for each part, in float32 or wider."""
        accumulators = []
        for tensor, _, count in self.parts:
            shape = (1, count, tensor.shape[1], self.width)
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            accumulators.append(torch.zeros(shape, dtype=dtype, device=tensor.device).transpose(1, 2))
        return accumulators

    def add(self, accumulators: list[torch.Tensor], ranges: Ranges, grad: Float[Tensor, "1 Hkv K D"]) -> None:
        """Adds the gradient [1, Hkv, rows of the ranges, D] of what `read` gave."""
        start = 0
        for part, low, high in self._split(ranges):
            accumulators[part][:, :, low:high] += grad[:, :, start : start + high - low]
            start += high - low

    def _split(self, ranges: Ranges) -> list[tuple[int, int, int]]:
        """(part, first row, end row) of each range, cut where parts meet."""
        pieces = []
        for low, high in ranges:
            for part in range(len(self.parts)):
                first, last = max(low, self.bounds[part]), min(high, self.bounds[part + 1])
                if first < last:
                    pieces.append((part, first - self.bounds[part], last - self.bounds[part]))
        return pieces

    def _pieces(self, ranges: Ranges) -> list[tuple[torch.Tensor, RowIndex]]:
        pieces: list[tuple[torch.Tensor, RowIndex]] = []
        for part, low, high in self._split(ranges):
            tensor, rows, _ = self.parts[part]
            if isinstance(rows, slice):
                pieces.append((tensor, slice(rows.start + low, rows.start + high)))
            else:
                pieces.append((tensor, rows[low:high]))
        return pieces


class _Sources:
    """Where a layer's keys and values lie: in the gateways that it reads, then its own."""

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
        own, count = slice(0, key.shape[2]), key.shape[2]
        above_keys = [(read.gateway.keys[call], read.rows, read.num_rows) for read in reads]
        above_values = [(read.gateway.values[call], read.rows, read.num_rows) for read in reads]
        self.keys = _KeyAxis([*above_keys, (key, own, count)], self.width)
        self.values = _KeyAxis([*above_values, (value, own, count)], self.width)

    def read(self, ranges: Ranges) -> tuple[Float[Tensor, "1 Hkv K D"], Float[Tensor, "1 Hkv K D"]]:
        """Keys and values [1, Hkv, rows of the ranges, D]."""
        return self.keys.read(ranges), self.values.read(ranges)


class _KeyGradients:
    """Gradients of all keys and values of a layer, summed over blocks in float32 or wider."""

    def __init__(self, sources: _Sources) -> None:
        self.sources = sources
        self.of_keys, self.of_values = sources.keys.zeros(), sources.values.zeros()

    def add(self, ranges: Ranges, key_grad: torch.Tensor, value_grad: torch.Tensor) -> None:
        """Adds those of one part."""
        self.sources.keys.add(self.of_keys, ranges, key_grad)
        self.sources.values.add(self.of_values, ranges, value_grad)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands gateways the gradients of their rows; returns those of the layer's own keys and values."""
        key, value = self.sources.key, self.sources.value
        key_grads = [each[..., : key.shape[3]] for each in self.of_keys]
        value_grads = [each[..., : value.shape[3]] for each in self.of_values]
        for read, key_grad, value_grad in zip(self.sources.reads, key_grads, value_grads, strict=False):
            read.gateway.add_gradients(self.sources.call, read.rows, key_grad, value_grad)
        return key_grads[-1].to(key.dtype), value_grads[-1].to(value.dtype)


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - tensor.shape[3]
    return tensor if missing == 0 else F.pad(tensor, (0, missing))


def _blocks(
    mask: TreeMask, window: int | None, chunk: int | None, dtype: torch.dtype
) -> list[tuple[Block, torch.Tensor | None]]:
    """The blocks of a mask, with their tiles as additive tensors ([1, 1, R, K])."""
    return [(block, _additive(block, dtype)) for block in mask.derived(plan_blocks, window, chunk)]


def _additive(block: Block, dtype: torch.dtype) -> torch.Tensor | None:
    if block.tile is None:
        return None
    seen = torch.from_numpy(block.tile)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[None, None]
