"""Keys and values that cross from an open micro-batch to those below it, and the gradients that come back.

An open micro-batch writes what its attention layers see: keys and values after position encoding, before any
expansion of heads, detached. Micro-batches below read them as extra keys; their backward adds gradients in float32.
When the open micro-batch runs with a graph, those gradients are injected where the keys and values are made, so the
same code serves with and without gradient checkpointing.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Rows = slice | torch.Tensor
# An attention layer, and which of its calls in one forward: some models run a layer several times.
Slot = Hashable


@dataclass(eq=False)
class Gateway:
    """Per slot (a call of a layer): keys and values [1, Hkv, n, D] of an open micro-batch's n tokens; gradients, in
    float32 or wider.

    states, state_grads: per recurrent function of a layer, [P, ...] states after the P rows `cut_rows` ([P] int64,
    ascending).
    is_offloaded: all of it waits in host memory, and comes to the device a layer at a time.
    """

    is_offloaded: bool = False
    keys: dict[Slot, torch.Tensor] = field(default_factory=dict)
    values: dict[Slot, torch.Tensor] = field(default_factory=dict)
    key_grads: dict[Slot, torch.Tensor] = field(default_factory=dict)
    value_grads: dict[Slot, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    state_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    cut_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def write(self, slot: Slot, key: torch.Tensor, value: torch.Tensor) -> None:
        if slot not in self.keys:
            kept = torch.device("cpu") if self.is_offloaded else key.device
            self.keys[slot], self.values[slot] = key.detach().to(kept), value.detach().to(kept)

    def add_gradients(self, slot: Slot, rows: Rows, key_grad: torch.Tensor, value_grad: torch.Tensor) -> None:
        """Adds the gradients of the rows that a micro-batch read."""
        pairs = ((self.key_grads, self.keys, key_grad), (self.value_grads, self.values, value_grad))
        for grads, written, grad in pairs:
            if slot not in grads:
                grads[slot] = torch.zeros_like(written[slot], dtype=torch.promote_types(grad.dtype, torch.float32))
            total = grads[slot]
            if isinstance(rows, slice):
                total[:, :, rows] += grad.to(total.device)
            else:
                total.index_add_(2, rows.to(total.device), grad.to(total))

    def write_states(self, name: str, states: torch.Tensor, cut_rows: np.ndarray) -> None:
        """Keeps the states ([P, ...]) of a recurrent layer after the rows that tokens of other micro-batches follow."""
        if name not in self.states:
            self.cut_rows = cut_rows
            self.states[name] = states.detach().to(torch.device("cpu") if self.is_offloaded else states.device)

    def add_state_gradients(self, name: str, index: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds the gradients of the kept states that a micro-batch began with."""
        if name not in self.state_grads:
            wide = torch.promote_types(grad.dtype, torch.float32)
            self.state_grads[name] = torch.zeros_like(self.states[name], dtype=wide)
        total = self.state_grads[name]
        total.index_add_(0, index.to(total.device), grad.to(total))


@dataclass(frozen=True, slots=True)
class GatewayRead:
    """The rows of one gateway that a micro-batch reads: a slice, or ascending row numbers."""

    gateway: Gateway
    rows: Rows
    num_rows: int


class _Inject(torch.autograd.Function):
    """Identity whose backward adds what came back through the gateway."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, value: torch.Tensor, gateway: Gateway, slot: Slot) -> Any:
        ctx.gateway, ctx.slot = gateway, slot
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, key_grad: torch.Tensor, value_grad: torch.Tensor) -> Any:
        slot = ctx.slot
        if slot in ctx.gateway.key_grads:
            key_grad = _sum_as(key_grad, ctx.gateway.key_grads[slot])
            value_grad = _sum_as(value_grad, ctx.gateway.value_grads[slot])
        return key_grad, value_grad, None, None


class _Extend(torch.autograd.Function):
    """Puts gateway keys and values in front of a micro-batch's own."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor, value: torch.Tensor, reads: tuple[GatewayRead, ...], slot: Slot) -> Any:
        ctx.reads, ctx.slot = reads, slot
        keys = [take(read.gateway.keys[slot], read.rows).to(key.device) for read in reads]
        values = [take(read.gateway.values[slot], read.rows).to(key.device) for read in reads]
        return torch.cat([*keys, key], dim=2), torch.cat([*values, value], dim=2)

    @staticmethod
    def backward(ctx: Any, key_grad: torch.Tensor, value_grad: torch.Tensor) -> Any:
        start = 0
        for read in ctx.reads:
            part = slice(start, start + read.num_rows)
            read.gateway.add_gradients(ctx.slot, read.rows, key_grad[:, :, part], value_grad[:, :, part])
            start += read.num_rows
        return key_grad[:, :, start:], value_grad[:, :, start:], None, None


def inject(key: torch.Tensor, value: torch.Tensor, gateway: Gateway, slot: Slot) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values whose backward also carries the gradients collected in `gateway`."""
    return _Inject.apply(key, value, gateway, slot)


def extend(
    key: torch.Tensor, value: torch.Tensor, reads: tuple[GatewayRead, ...], slot: Slot
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gateway keys and values first, then a micro-batch's own ([1, Hkv, G + T, D])."""
    return _Extend.apply(key, value, reads, slot)


def take(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Rows of the token axis of [1, Hkv, n, D]; a view where they are a slice."""
    return tensor[:, :, rows] if isinstance(rows, slice) else tensor.index_select(2, rows.to(tensor.device))


def _sum_as(grad: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    return (grad.to(wide.dtype) + wide.to(grad.device)).to(grad.dtype)
