"""Keys and values that cross between ranks that compute one micro-batch together (context parallelism).

Each rank has a run of the micro-batch's tokens. In a layer the ranks exchange their keys and values, and each keeps
those that its tokens see in a gateway, as if an open micro-batch had left them; attention adds their gradients there.
The backward of the exchange sends these, in float32, to the ranks that the tokens belong to.

Letters: T tokens of the micro-batch, n tokens of this rank, P tokens of the largest part, H key heads, D head size.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from treewise.base.shapes import Context, Float
from treewise.nn.attention.gateway import Gateway, GatewayRead, LayerCall
from treewise.nn.platform.tensors import to_device


@dataclass(eq=False)
class ContextExchange:
    """What a rank reads from the others in the layers of one micro-batch.

    group: of the ranks. bounds: [ranks + 1] int64, the rows where each rank's tokens begin. rows: [r] int64, the rows
    of other ranks that this one reads. index: of this rank in the group. read: what attention gets.
    """

    group: Any
    bounds: np.ndarray
    rows: np.ndarray
    index: int
    device: torch.device
    read: GatewayRead = field(init=False)

    def __post_init__(self) -> None:
        self.read = GatewayRead(Gateway(), slice(0, len(self.rows)), len(self.rows))

    @property
    def own(self) -> slice:
        """This rank's rows of the micro-batch."""
        return slice(int(self.bounds[self.index]), int(self.bounds[self.index + 1]))

    @property
    def num_padded(self) -> int:
        """P: every rank sends as many rows."""
        return int(np.diff(self.bounds).max())

    @cached_property
    def padded_index(self) -> torch.Tensor:
        """[T] int64: where each row of the micro-batch is in what all ranks send, [ranks * P]."""
        counts, number = np.diff(self.bounds), np.arange(self.bounds[-1])
        moved = np.arange(len(counts)) * self.num_padded - self.bounds[:-1]
        return to_device(number + np.repeat(moved, counts), self.device)

    @cached_property
    def read_index(self) -> torch.Tensor:
        """[r] int64: where the rows that this rank reads are in what all ranks send."""
        return self.padded_index[to_device(self.rows, self.device)]

    def gathered(self, own: Float[Tensor, "n H D"]) -> Float[Tensor, "p H D"]:
        """What all ranks send, p = ranks * P rows, each its own rows and zeros behind them."""
        sent = own.new_zeros(self.num_padded, *own.shape[1:])
        sent[: len(own)] = own
        num_ranks = len(self.bounds) - 1
        received = own.new_empty(num_ranks * self.num_padded, *own.shape[1:])
        distributed.all_gather(list(received.chunk(num_ranks)), sent, group=self.group)
        return received

    def exchanged(
        self,
        key: Float[Tensor, "1 H n D"],
        value: Float[Tensor, "1 H n Dv"],
        call: LayerCall,
        writes: Gateway | None,
        injects: Gateway | None,
    ) -> tuple[Float[Tensor, "1 H n D"], Float[Tensor, "1 H n Dv"]]:
        """Fills `read` for one call of a layer; returns the own keys and values, whose backward adds the gradients that
        other ranks have for them. `kept` empties `read` again.

        writes: the gateway of an open micro-batch, which gets the rows of all ranks. injects: one whose gradients, of
        all rows, are added in the backward.
        """
        return _Exchange.apply(key, value, self, call, writes, injects)

    def kept(self, out: Float[Tensor, "1 H n Dv"], call: LayerCall) -> Float[Tensor, "1 H n Dv"]:
        """Attention's output, whose backward fills `read` again.

        What was read is kept as autograd keeps tensors: not at all without a graph, computed again with activation
        checkpoints, on the host where the graph is.
        """
        return _Keep.apply(out, self.read.gateway, call)

    def summed(self, sent: Float[Tensor, "p H D"]) -> Float[Tensor, "n H D"]:
        """This rank's rows of the sum over all ranks of what each has for the rows of all."""
        received = sent.new_empty(self.num_padded, *sent.shape[1:])
        distributed.reduce_scatter(received, list(sent.chunk(len(self.bounds) - 1)), group=self.group)
        return received[: self.own.stop - self.own.start]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        key: torch.Tensor,
        value: torch.Tensor,
        ranks: ContextExchange,
        call: LayerCall,
        writes: Gateway | None,
        injects: Gateway | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.call, ctx.injects = ranks, call, injects
        ctx.sizes = [key.shape[3], value.shape[3]]
        num_own = ranks.own.stop - ranks.own.start
        received = ranks.gathered(_as_rows(key, value)[:num_own])
        if writes is not None:
            writes.write(call, *_as_heads(received.index_select(0, ranks.padded_index), ctx.sizes))
        kept = ranks.read.gateway
        kept.keys[call], kept.values[call] = _as_heads(received.index_select(0, ranks.read_index), ctx.sizes)
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Context, key_grad: torch.Tensor, value_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ranks: ContextExchange = ctx.ranks
        call: LayerCall = ctx.call
        kept = ranks.read.gateway
        del kept.keys[call], kept.values[call]  # attention's backward has read them
        wide = torch.promote_types(key_grad.dtype, torch.float32)
        num_sent = (len(ranks.bounds) - 1) * ranks.num_padded
        sent = key_grad.new_zeros(num_sent, key_grad.shape[1], sum(ctx.sizes), dtype=wide)
        if call in kept.key_grads:
            sent[ranks.read_index] = _as_rows(kept.key_grads.pop(call), kept.value_grads.pop(call))
        sums = None if ctx.injects is None else ctx.injects.gradients(call, sent.device)
        if sums is not None:
            sent.index_add_(0, ranks.padded_index, _as_rows(*sums).to(sent))
        of_others = _as_heads(ranks.summed(sent), ctx.sizes)
        grads = []
        for grad, more in zip((key_grad, value_grad), of_others, strict=True):
            total = grad.to(wide, copy=True)
            total[:, :, : more.shape[2]] += more
            grads.append(total.to(grad.dtype))
        return *grads, None, None, None, None


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, out: torch.Tensor, kept: Gateway, call: LayerCall) -> torch.Tensor:
        ctx.kept, ctx.call = kept, call
        ctx.save_for_backward(kept.keys.pop(call), kept.values.pop(call))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        key, value = ctx.saved_tensors  # with activation checkpoints this computes the layer again
        ctx.kept.keys[ctx.call], ctx.kept.values[ctx.call] = key, value
        return grad, None, None


def _as_rows(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[n, H, D + Dv] from keys [1, H, n, D] and values."""
    return torch.cat([key[0], value[0]], dim=2).transpose(0, 1)


def _as_heads(rows: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Keys [1, H, n, D] and values from rows [n, H, D + Dv]."""
    return [each.contiguous() for each in rows.transpose(0, 1)[None].split(sizes, dim=3)]
