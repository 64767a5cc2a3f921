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

from treewise.nn.attention.gateway import Gateway, GatewayRead, LayerCall
from treewise.nn.device import to_device
from treewise.shapes import Float


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
    def row_index(self) -> torch.Tensor:
        """[r] int64: `rows` on the device."""
        return to_device(self.rows, self.device)

    def gathered(self, own: Float[Tensor, "1 H n D"]) -> Float[Tensor, "1 H T D"]:
        """A tensor of all rows of the micro-batch from those of each rank."""
        rows = own[0].transpose(0, 1).contiguous()
        sent = rows.new_zeros(self.num_padded, *rows.shape[1:])
        sent[: len(rows)] = rows
        num_ranks = len(self.bounds) - 1
        received = rows.new_empty(num_ranks * self.num_padded, *rows.shape[1:])
        distributed.all_gather(list(received.chunk(num_ranks)), sent, group=self.group)
        whole = received.index_select(0, self.padded_index)
        return whole.transpose(0, 1)[None]

    def summed(self, whole: Float[Tensor, "1 H T D"]) -> Float[Tensor, "1 H n D"]:
        """This rank's rows of the sum over all ranks."""
        num_ranks = len(self.bounds) - 1
        rows = whole[0].transpose(0, 1)
        sent = rows.new_zeros(num_ranks * self.num_padded, *rows.shape[1:])
        sent[self.padded_index] = rows
        received = sent.new_empty(self.num_padded, *rows.shape[1:])
        distributed.reduce_scatter(received, list(sent.chunk(num_ranks)), group=self.group)
        own = self.own
        return received[: own.stop - own.start].transpose(0, 1)[None]


def exchange(
    key: Float[Tensor, "1 H n D"],
    value: Float[Tensor, "1 H n Dv"],
    ranks: ContextExchange,
    call: LayerCall,
    writes: Gateway | None,
    injects: Gateway | None,
) -> tuple[Float[Tensor, "1 H n D"], Float[Tensor, "1 H n Dv"]]:
    """Fills `ranks.read` for one call of a layer; returns the own keys and values, whose backward adds the gradients
    that other ranks have for them.

    writes: the gateway of an open micro-batch, which gets the rows of all ranks. injects: one whose gradients, of all
    rows, are added in the backward.
    """
    return _Exchange.apply(key, value, ranks, call, writes, injects)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        ranks: ContextExchange,
        call: LayerCall,
        writes: Gateway | None,
        injects: Gateway | None,
    ) -> Any:
        ctx.ranks, ctx.call, ctx.injects, ctx.width = ranks, call, injects, key.shape[3]
        num_own = ranks.own.stop - ranks.own.start
        both = ranks.gathered(torch.cat([key, value], dim=3)[:, :, :num_own])
        whole_key, whole_value = both.split([key.shape[3], value.shape[3]], dim=3)
        if writes is not None:
            writes.write(call, whole_key.contiguous(), whole_value.contiguous())
        kept, rows = ranks.read.gateway, ranks.row_index
        kept.keys[call], kept.values[call] = whole_key.index_select(2, rows), whole_value.index_select(2, rows)
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, key_grad: torch.Tensor, value_grad: torch.Tensor) -> Any:
        ranks, call, kept = ctx.ranks, ctx.call, ctx.ranks.read.gateway
        wide = torch.promote_types(key_grad.dtype, torch.float32)
        num_tokens, num_heads = int(ranks.bounds[-1]), key_grad.shape[1]
        both = key_grad.new_zeros(1, num_heads, num_tokens, ctx.width + value_grad.shape[3], dtype=wide)
        whole_key, whole_value = both.split([ctx.width, value_grad.shape[3]], dim=3)
        if call in kept.key_grads:
            rows = ranks.row_index
            whole_key.index_add_(2, rows, kept.key_grads.pop(call))
            whole_value.index_add_(2, rows, kept.value_grads.pop(call))
        if ctx.injects is not None and call in ctx.injects.key_grads:
            whole_key += ctx.injects.key_grads[call].to(both.device)
            whole_value += ctx.injects.value_grads[call].to(both.device)
        del kept.keys[call], kept.values[call]  # attention's backward has read them
        of_others = ranks.summed(both).split([ctx.width, value_grad.shape[3]], dim=3)
        grads = []
        for grad, more in zip((key_grad, value_grad), of_others, strict=True):
            total = grad.to(wide, copy=True)
            total[:, :, : more.shape[2]] += more
            grads.append(total.to(grad.dtype))
        return *grads, None, None, None, None
