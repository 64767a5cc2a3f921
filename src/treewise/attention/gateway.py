"""Keys and values that cross from an open micro-batch to those below it, and the gradients that come back.

An open micro-batch writes what its attention layers see: keys and values after position encoding, before any
expansion of heads, detached. Micro-batches below read them as extra keys; their backward adds gradients in float32.
When the open micro-batch runs with a graph, those gradients are injected where the keys and values are made, so the
same code serves with and without gradient checkpointing.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

Rows = slice | torch.Tensor


@dataclass(eq=False)
class Gateway:
    """Per layer: keys and values [1, Hkv, n, D] of an open micro-batch's n tokens; gradients, float32 or wider.

    is_offloaded: all of it waits in host memory, and comes to the device a layer at a time.
    """

    is_offloaded: bool = False
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    key_grads: dict[int, torch.Tensor] = field(default_factory=dict)
    value_grads: dict[int, torch.Tensor] = field(default_factory=dict)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer not in self.keys:
            kept = torch.device("cpu") if self.is_offloaded else key.device
            self.keys[layer], self.values[layer] = key.detach().to(kept), value.detach().to(kept)

    def add_gradients(self, layer: int, rows: Rows, key_grad: torch.Tensor, value_grad: torch.Tensor) -> None:
        """Adds the gradients of the rows that a micro-batch read."""
        pairs = ((self.key_grads, self.keys, key_grad), (self.value_grads, self.values, value_grad))
        for grads, written, grad in pairs:
            if layer not in grads:
                grads[layer] = torch.zeros_like(written[layer], dtype=torch.promote_types(grad.dtype, torch.float32))
            total = grads[layer]
            if isinstance(rows, slice):
                total[:, :, rows] += grad.to(total.device)
            else:
                total.index_add_(2, rows.to(total.device), grad.to(total))


@dataclass(frozen=True, slots=True)
class GatewayRead:
    """The rows of one gateway that a micro-batch reads: a slice, or ascending row numbers."""

    gateway: Gateway
    rows: Rows
    num_rows: int


class _Inject(torch.autograd.Function):
    """Identity whose backward adds what came back through the gateway."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, value: torch.Tensor, gateway: Gateway, layer: int) -> Any:
        ctx.gateway, ctx.layer = gateway, layer
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, key_grad: torch.Tensor, value_grad: torch.Tensor) -> Any:
        layer = ctx.layer
        if layer in ctx.gateway.key_grads:
            key_grad = _sum_as(key_grad, ctx.gateway.key_grads[layer])
            value_grad = _sum_as(value_grad, ctx.gateway.value_grads[layer])
        return key_grad, value_grad, None, None


class _Extend(torch.autograd.Function):
    """Puts gateway keys and values in front of a micro-batch's own."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, value: torch.Tensor, reads: tuple[GatewayRead, ...], layer: int) -> Any:
        ctx.reads, ctx.layer = reads, layer
        keys = [take(read.gateway.keys[layer], read.rows).to(key.device) for read in reads]
        values = [take(read.gateway.values[layer], read.rows).to(key.device) for read in reads]
        return torch.cat([*keys, key], dim=2), torch.cat([*values, value], dim=2)

    @staticmethod
    def backward(ctx: Any, key_grad: torch.Tensor, value_grad: torch.Tensor) -> Any:
        start = 0
        for read in ctx.reads:
            part = slice(start, start + read.num_rows)
            read.gateway.add_gradients(ctx.layer, read.rows, key_grad[:, :, part], value_grad[:, :, part])
            start += read.num_rows
        return key_grad[:, :, start:], value_grad[:, :, start:], None, None


def inject(key: torch.Tensor, value: torch.Tensor, gateway: Gateway, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values whose backward also carries the gradients collected in `gateway`."""
    return _Inject.apply(key, value, gateway, layer)


def extend(
    key: torch.Tensor, value: torch.Tensor, reads: tuple[GatewayRead, ...], layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gateway keys and values first, then a micro-batch's own ([1, Hkv, G + T, D])."""
    return _Extend.apply(key, value, reads, layer)


def take(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Rows of the token axis of [1, Hkv, n, D]; a view where they are a slice."""
    return tensor[:, :, rows] if isinstance(rows, slice) else tensor.index_select(2, rows.to(tensor.device))


def _sum_as(grad: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    return (grad.to(wide.dtype) + wide.to(grad.device)).to(grad.dtype)
