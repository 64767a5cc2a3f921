"""Keys and values that cross from an open micro-batch to those below it, and the gradients that come back.

An open micro-batch writes what its attention layers see: keys and values after position encoding, before any
expansion of heads, detached. Micro-batches below read them as extra keys; their backward adds gradients in float32.
When the open micro-batch runs with a graph, those gradients are injected where the keys and values are computed, so the
same code serves with and without gradient checkpointing.

Offloaded gateways of a GPU wait in pinned memory of the host, a row of a token after the other, and move by copies
beside the kernels (`side_copies`), keys and values of the next layer while one computes: no host operation looks into
them, so none waits for the device. Their sums of gradients stay on the device where they fit; else each addition
fetches its rows and sends them back, in the order of the kernels.

Which layers' gateways get gradients is a fact of the plan and of what is trained (`Carried`). A frozen layer of a piece
has no gradient of its own, but what is trained above the piece may need the one that passes through it.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from treewise.base import features
from treewise.base.shapes import Context, Float
from treewise.nn.platform.tensors import on_host

if TYPE_CHECKING:
    from treewise.nn.attention.side_copies import Arrival

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
    if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors):
        return tensors
    return _Carry.apply(ANCHOR, *tensors)


@dataclass(eq=False)
class Gateway:
    """What an open micro-batch of n tokens hands to those below it: a KV cache with gradients.

    keys, values: per call of a layer, [1, Hkv, n, D] in the layer's dtype; their gradients in float32 or wider.
    states, state_grads: per recurrent function of a layer, [P, ...] states after the P rows `cut_rows` ([P] int64,
    ascending). is_offloaded: all of it is kept in host memory and copied to the device a layer at a time, but for sums
    of gradients that take at most half of the device's free memory when the first is added.
    """

    is_offloaded: bool = False
    keys: dict[LayerCall, torch.Tensor] = field(default_factory=dict)
    values: dict[LayerCall, torch.Tensor] = field(default_factory=dict)
    key_grads: dict[LayerCall, torch.Tensor] = field(default_factory=dict)
    value_grads: dict[LayerCall, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    state_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    cut_rows: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _has_sums_on_host: bool | None = None  # of an offloaded one on a GPU; None before the first

    def write(self, call: LayerCall, key: Float[Tensor, "1 Hkv n D"], value: Float[Tensor, "1 Hkv n Dv"]) -> None:
        """Keeps keys and values ([1, Hkv, n, D]) of one call of a layer; a recomputation changes nothing."""
        if call not in self.keys:
            has_row_order = (
                self.is_offloaded and key.device.type != "cpu"
            )  # rows that are read are then one piece of host memory
            key, value = (_heads(_sent(_rows(each))) if has_row_order else _own(each) for each in (key, value))
            self.keys[call], self.values[call] = key, value

    def add_gradients(self, call: LayerCall, rows: RowIndex, key_grad: torch.Tensor, value_grad: torch.Tensor) -> None:
        """Adds gradients ([1, Hkv, rows, D]) of the rows that a micro-batch read."""
        pairs = ((self.key_grads, self.keys, key_grad), (self.value_grads, self.values, value_grad))
        for grads, written, grad in pairs:
            if call not in grads:
                grads[call] = _heads(self._zeros(_rows(written[call]), grad))
            _add_rows(_rows(grads[call]), rows, _rows(grad))

    def gradients(self, call: LayerCall, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sums for keys and values ([1, Hkv, n, D]) on a device; None where nothing was added."""
        if call not in self.key_grads:
            return None
        key, value = (
            _heads(_rows(each[call]).to(device, non_blocking=True)) for each in (self.key_grads, self.value_grads)
        )
        return key, value

    def write_states(self, name: str, states: torch.Tensor, cut_rows: np.ndarray) -> None:
        """Keeps states ([P, ...]) of a recurrent layer after `cut_rows`, which other micro-batches continue."""
        if name not in self.states:
            self.cut_rows = cut_rows
            self.states[name] = _sent(states) if self.is_offloaded and states.device.type != "cpu" else _own(states)

    def states_on(self, name: str, device: torch.device) -> torch.Tensor:
        """The kept states ([P, ...]) on a device."""
        return fetched(self.states[name], device)()

    def add_state_gradients(self, name: str, index: torch.Tensor, grad: torch.Tensor) -> None:
        """Adds gradients ([n, ...]) of the kept states `index` ([n] int64) that a micro-batch began with."""
        if name not in self.state_grads:
            self.state_grads[name] = self._zeros(self.states[name], grad)
        _add_rows(self.state_grads[name], index, grad)

    def _zeros(self, written: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """A sum of gradients in float32 or wider, in the shape and order of memory of what was written."""
        wide = torch.promote_types(grad.dtype, torch.float32)
        if written.device == grad.device:
            return torch.zeros_like(written, dtype=wide)
        if self._has_sums_on_host is None:
            of_all = [*self.keys.values(), *self.values.values(), *self.states.values()]
            num_bytes = sum(each.numel() for each in of_all) * wide.itemsize
            self._has_sums_on_host = not features.side_copies.has_room(grad.device, num_bytes)
        if self._has_sums_on_host:
            return torch.zeros(written.shape, dtype=wide, device="cpu", pin_memory=True)
        return torch.zeros(written.shape, dtype=wide, device=grad.device)


@dataclass(slots=True, eq=False)
class GatewayRead:
    """The rows of one gateway that a micro-batch reads: a slice, or ascending row indices."""

    gateway: Gateway
    rows: RowIndex
    num_rows: int
    _ahead: "dict[LayerCall, tuple[Arrival, Arrival]]" = field(default_factory=dict)  # copies that are on their way
    _last: int = -1  # the call that was read last, in the order in which calls were written

    def keys_and_values(self, call: LayerCall, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, Hkv, rows, D] of one call of a layer. From the host, those of the next call are on their way then: of the
        layer after, and where a backward computes layers again, of the layer before."""
        keys, values = self.gateway.keys, self.gateway.values
        if keys[call].device == device:
            return take(keys[call], self.rows), take(values[call], self.rows)
        calls = list(keys)
        index = calls.index(call)
        following = index + (1 if index >= self._last else -1)
        arriving = self._ahead.pop(call, None) or self._fetched(call, device)
        self._ahead.clear()
        if 0 <= following < len(calls):
            self._ahead[calls[following]] = self._fetched(calls[following], device)
        self._last = index
        key, value = (each() for each in arriving)
        return self._chosen(key), self._chosen(value)

    def _fetched(self, call: LayerCall, device: torch.device) -> "tuple[Arrival, Arrival]":
        """All rows where they are no slice: the host cannot choose some before the device has written them."""
        rows = self.rows if isinstance(self.rows, slice) else slice(None)
        key, value = (_rows(each[call])[rows] for each in (self.gateway.keys, self.gateway.values))
        return fetched(key, device), fetched(value, device)

    def _chosen(self, rows: torch.Tensor) -> torch.Tensor:
        heads = _heads(rows)
        return heads if isinstance(self.rows, slice) else take(heads, self.rows)


class _Carry(torch.autograd.Function):
    """Identity of tensors that need no gradient themselves."""

    @staticmethod
    def forward(_ctx: object, _: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(_ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None,) * (1 + len(grads))


class _Inject(torch.autograd.Function):
    """Identity whose backward adds the gradients collected in the gateway."""

    @staticmethod
    def forward(
        ctx: Context, key: torch.Tensor, value: torch.Tensor, gateway: Gateway, call: LayerCall
    ) -> tuple[torch.Tensor, ...]:
        ctx.gateway, ctx.call = gateway, call
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Context, key_grad: torch.Tensor, value_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums = ctx.gateway.gradients(ctx.call, key_grad.device)
        if sums is not None:
            key_grad, value_grad = (
                (grad.to(wide.dtype) + wide).to(grad.dtype)
                for grad, wide in zip((key_grad, value_grad), sums, strict=True)
            )
        return key_grad, value_grad, None, None


class _Extend(torch.autograd.Function):
    """Puts gateway keys and values in front of a micro-batch's own."""

    @staticmethod
    def forward(
        ctx: Context, key: torch.Tensor, value: torch.Tensor, reads: tuple[GatewayRead, ...], call: LayerCall
    ) -> tuple[torch.Tensor, ...]:
        ctx.reads, ctx.call = reads, call
        keys, values = zip(*(read.keys_and_values(call, key.device) for read in reads), strict=True)
        return torch.cat([*keys, key], dim=2), torch.cat([*values, value], dim=2)

    @staticmethod
    def backward(ctx: Context, key_grad: torch.Tensor, value_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
    return tensor[:, :, rows] if isinstance(rows, slice) else tensor.index_select(2, rows)


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, beside the kernels of a GPU."""
    if not tensor.is_cuda:
        return on_host(tensor)
    sent: Tensor = features.side_copies.side_copies(tensor.device).to_host(tensor)
    return sent


def fetched(kept: torch.Tensor, device: torch.device) -> "Arrival":
    """Begins to copy what is kept to a device, beside the kernels of a GPU; called, the result gives the copy."""
    if device.type == "cuda" and kept.device != device:
        arrival: Arrival = features.side_copies.side_copies(device).to_device(kept)
        return arrival
    there = kept.to(device, non_blocking=True)
    return lambda: there


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is kept: a part of a larger one (of a fused projection) is copied, or all would stay."""
    kept = tensor.detach()
    return kept.clone() if kept.untyped_storage().nbytes() > kept.numel() * kept.itemsize else kept


def _add_rows(total: torch.Tensor, rows: RowIndex, grad: torch.Tensor) -> None:
    """Adds [r, ...] gradients to rows of [n, ...], in place; of a sum on the host by queued copies there and back."""
    kept, rest = (total[rows], slice(None)) if isinstance(rows, slice) else (total, rows)
    here = kept if total.device == grad.device else kept.to(grad.device, non_blocking=True)
    if isinstance(rest, slice):
        here += grad
    else:
        here.index_add_(0, rest, grad.to(here.dtype))
    if here is not kept:
        kept.copy_(here, non_blocking=True)


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """[n, Hkv, D] of [1, Hkv, n, D]; a view."""
    return heads[0].transpose(0, 1)


def _heads(rows: torch.Tensor) -> torch.Tensor:
    """[1, Hkv, n, D] of [n, Hkv, D]; a view."""
    return rows.transpose(0, 1)[None]
