"""Keys and values that cross from an open micro-batch to those below it, and the gradients that come back.

An open micro-batch writes what its attention layers see: keys and values after position encoding, before any
expansion of heads, detached. Micro-batches below read them as extra keys; their backward adds gradients in float32.
When the open micro-batch runs with a graph, those gradients are injected where the keys and values are computed, so the
same code serves with and without gradient checkpointing.

Which layers' gateways get gradients is a fact of the plan and of what is trained (`Carried`). A frozen layer of a piece
has no gradient of its own, but what is trained above the piece may need the one that passes through it.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from treewise.nn.gradients import BackwardContext
from treewise.shapes import Float

# Rows of one gateway: a slice, or ascending indices ([n] int64).
RowIndex = slice | torch.Tensor
# An attention layer, and which of its calls in one forward: some models run a layer several times.
LayerCall = Hashable
# Makes what is computed with it require a gradient, and gets none itself.
ANCHOR = torch.zeros((), requires_grad=True)


@dataclass(frozen=True, slots=True)
class Carried:
    """Which layers of a micro-batch carry gradients to something above it, whether or not they are trained themselves.

    from_layer: those from the first trained one on; `before` are the modules of the layers before it. from_input: all,
    and the input rows, too.
    """

    from_layer: bool = False
    before: frozenset[nn.Module] = frozenset()
    from_input: bool = False

    def includes(self, module: nn.Module, index: int) -> bool:
        """Whether call number `index` of a layer does. A layer that runs again may come after trained ones."""
        return self.from_input or (self.from_layer and (index > 0 or module not in self.before))


NOTHING, EVERYTHING = Carried(), Carried(from_input=True)


def carry(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, which require gradients; as they are where one of them does, or where gradients are disabled."""
    if not torch.is_grad_enabled() or any(each.requires_grad for each in tensors):
        return tensors
    return _Carry.apply(ANCHOR, *tensors)


@dataclass(eq=False)
class Gateway:
    """What an open micro-batch of n tokens hands to those below it: a KV cache with gradients.

    keys, values: per call of a layer, [1, Hkv, n, D] in the layer's dtype; their gradients in float32 or wider.
    states, state_grads: per recurrent function of a layer, [P, ...] states after the P rows `cut_rows` ([P] int64,
    ascending). is_offloaded: all of it is kept in host memory and copied to the device a layer at a time.
    """

    is_offloaded: bool = False
    keys: dict[LayerCall, torch.Tensor] = field(default_factory=dict)
    values: dict[LayerCall, torch.Tensor] = field(default_factory=dict)
    key_grads: dict[LayerCall, torch.Tensor] = field(default_factory=dict)
    value_grads: dict[LayerCall, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    state_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    cut_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def write(self, call: LayerCall, key: Float[Tensor, "1 Hkv n D"], value: Float[Tensor, "1 Hkv n Dv"]) -> None:
        """Keeps keys and values ([1, Hkv, n, D]) of one call of a layer; a recomputation changes nothing."""
        if call not in self.keys:
            self.keys[call], self.values[call] = self._own(key), self._own(value)

    def add_gradients(self, call: LayerCall, rows: RowIndex, key_grad: torch.Tensor, value_grad: torch.Tensor) -> None:
        """Adds gradients ([1, Hkv, rows, D]) of the rows that a micro-batch read."""
        pairs = ((self.key_grads, self.keys, key_grad), (self.value_grads, self.values, value_grad))
        for grads, written, grad in pairs:
            if call not in grads:
                grads[call] = torch.zeros_like(written[call], dtype=torch.promote_types(grad.dtype, torch.float32))
            total = grads[call]
            if isinstance(rows, slice):
                total[:, :, rows] += grad.to(total.device)
            else:
                total.index_add_(2, rows.to(total.device), grad.to(total))

    def write_states(self, name: str, states: torch.Tensor, cut_rows: np.ndarray) -> None:
        """Keeps states ([P, ...]) of a recurrent layer after `cut_rows`, which other micro-batches continue."""
        if name not in self.states:
            self.cut_rows = cut_rows
            self.states[name] = self._own(states)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it is kept: a part of a larger one (of a fused projection) is copied, or all would stay."""
        kept = tensor.detach().to("cpu" if self.is_offloaded else tensor.device)
        return kept.clone() if kept.untyped_storage().nbytes() > kept.numel() * kept.itemsize else kept

    def add_state_gradients(self, name: str, index: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds gradients ([n, ...]) of the kept states `index` ([n] int64) that a micro-batch began with."""
        if name not in self.state_grads:
            wide = torch.promote_types(grad.dtype, torch.float32)
            self.state_grads[name] = torch.zeros_like(self.states[name], dtype=wide)
        total = self.state_grads[name]
        total.index_add_(0, index.to(total.device), grad.to(total))


@dataclass(frozen=True, slots=True)
class GatewayRead:
    """The rows of one gateway that a micro-batch reads: a slice, or ascending row indices."""

    gateway: Gateway
    rows: RowIndex
    num_rows: int


class _Carry(torch.autograd.Function):
    """Identity of tensors that need no gradient themselves."""

    @staticmethod
    def forward(_ctx: object, _: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(_ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None,) * (1 + len(grads))


class _Inject(torch.autograd.Function):
    """Identity whose backward adds the gradients collected in the gateway."""

    @staticmethod
    def forward(
        ctx: BackwardContext, key: torch.Tensor, value: torch.Tensor, gateway: Gateway, call: LayerCall
    ) -> tuple[torch.Tensor, ...]:
        ctx.gateway, ctx.call = gateway, call
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(
        ctx: BackwardContext, key_grad: torch.Tensor, value_grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        if call in ctx.gateway.key_grads:
            key_grad = _sum_as(key_grad, ctx.gateway.key_grads[call])
            value_grad = _sum_as(value_grad, ctx.gateway.value_grads[call])
        return key_grad, value_grad, None, None


class _Extend(torch.autograd.Function):
    """Puts gateway keys and values in front of a micro-batch's own."""

    @staticmethod
    def forward(
        ctx: BackwardContext, key: torch.Tensor, value: torch.Tensor, reads: tuple[GatewayRead, ...], call: LayerCall
    ) -> tuple[torch.Tensor, ...]:
        ctx.reads, ctx.call = reads, call
        keys = [take(read.gateway.keys[call], read.rows).to(key.device) for read in reads]
        values = [take(read.gateway.values[call], read.rows).to(key.device) for read in reads]
        return torch.cat([*keys, key], dim=2), torch.cat([*values, value], dim=2)

    @staticmethod
    def backward(
        ctx: BackwardContext, key_grad: torch.Tensor, value_grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        start = 0
        for read in ctx.reads:
            part = slice(start, start + read.num_rows)
            read.gateway.add_gradients(ctx.call, read.rows, key_grad[:, :, part], value_grad[:, :, part])
            start += read.num_rows
        return key_grad[:, :, start:], value_grad[:, :, start:], None, None


def inject(
    key: Float[Tensor, "1 Hkv n D"], value: Float[Tensor, "1 Hkv n Dv"], gateway: Gateway, call: LayerCall
) -> tuple[Float[Tensor, "1 Hkv n D"], Float[Tensor, "1 Hkv n Dv"]]:
    """Keys and values ([1, Hkv, n, D]) whose backward also adds the gradients collected in `gateway`."""
    return _Inject.apply(key, value, gateway, call)


def extend(
    key: Float[Tensor, "1 Hkv T D"], value: Float[Tensor, "1 Hkv T Dv"], reads: tuple[GatewayRead, ...], call: LayerCall
) -> tuple[Float[Tensor, "1 Hkv K D"], Float[Tensor, "1 Hkv K Dv"]]:
    """Keys and values [1, Hkv, G + T, D]: those read from gateways first, then the micro-batch's own."""
    return _Extend.apply(key, value, reads, call) if reads else (key, value)


def take(tensor: torch.Tensor, rows: RowIndex) -> torch.Tensor:
    """Rows of the token axis of [1, Hkv, n, D]; a view where they are a slice."""
    return tensor[:, :, rows] if isinstance(rows, slice) else tensor.index_select(2, rows.to(tensor.device))


def _sum_as(grad: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    return (grad.to(wide.dtype) + wide.to(grad.device)).to(grad.dtype)
