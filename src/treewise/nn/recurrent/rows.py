"""Rows and states of one micro-batch: segments, schedule and index tensors, computed for its first recurrent layer and
shared by all; the states that enter and leave each function of a layer through gateways; the gradients of both.

Letters: T rows, Z padded positions, n states, P cuts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from treewise.base.shapes import Context, Float, Int
from treewise.nn.attention.gateway import ANCHOR, Gateway
from treewise.nn.attention.interface import TreeContext
from treewise.nn.platform.tensors import to_device
from treewise.nn.recurrent.segments import (
    RowSegments,
    Schedule,
    make_schedule,
    row_segments,
    rows_before,
    rows_up_to_end,
)
from treewise.planning.plans import Layout, Plan


@dataclass(frozen=True, slots=True)
class ConvIndex:
    """Where a convolution of a given width takes its inputs from.

    Rows of the extended axis: T own rows, one row of zeros, then the tails of the entering segments, `width - 1` rows
    each. gather: [T + S * (width - 1)] int64, every segment behind its tail. keep: [T] int64, the positions of own rows
    in it. tails: [P, width - 1] int64, what the gateway keeps for each cut.
    """

    gather: torch.Tensor
    keep: torch.Tensor
    tails: torch.Tensor


@dataclass(eq=False)
class TreeRows:
    """Segments, schedule and index tensors of micro-batch number `micro_batch` of a plan."""

    plan: Plan
    micro_batch: int
    layout: Layout
    _tensors: dict[object, torch.Tensor] = field(default_factory=dict)
    _convs: dict[object, ConvIndex] = field(default_factory=dict)

    @cached_property
    def segments(self) -> RowSegments:
        return row_segments(self.plan, self.micro_batch, self.layout)

    @cached_property
    def schedule(self) -> Schedule:
        return make_schedule(self.segments)

    def tensor(self, name: object, array: Int[np.ndarray, "..."], device: torch.device) -> Int[Tensor, "..."]:
        """An index array as an int64 tensor, one for each device."""
        if (name, device) not in self._tensors:
            self._tensors[name, device] = to_device(array, device, torch.long)
        return self._tensors[name, device]

    def entering(self, gateway: int, cut_rows: Int[np.ndarray, " P"]) -> Int[np.ndarray, " n"]:
        """Which of a gateway's kept states (at `cut_rows`) the segments below it begin with, in segment order."""
        segments = self.segments
        rows = segments.gateway_row[segments.gateway == gateway]
        index = np.searchsorted(cut_rows, rows)
        assert np.array_equal(cut_rows[index], rows), "a gateway keeps the state of every token that is read below it"
        return index

    @cached_property
    def entering_order(self) -> np.ndarray:
        """From entering segments ordered by gateway to entering segments in row order."""
        gateway = self.segments.gateway[self.schedule.entering]
        return np.argsort(np.argsort(gateway, kind="stable"), kind="stable")

    def conv_index(self, width: int, device: torch.device) -> ConvIndex:
        """The index of a convolution of `width` tokens, one for each width and device."""
        if (width, device) in self._convs:
            return self._convs[width, device]
        segments, num_rows, tail = self.segments, self.layout.num_tokens, width - 1
        before = rows_before(segments, tail)
        cut_tails = rows_up_to_end(segments, before, segments.cuts)
        rank = np.zeros(segments.num_segments, dtype=np.int64)  # index of an entering segment among them
        rank[self.schedule.entering] = np.arange(len(self.schedule.entering))

        def on_axis(code: np.ndarray) -> np.ndarray:
            segment, entry = np.divmod(np.maximum(-2 - code, 0), max(tail, 1))
            tail_row = num_rows + 1 + rank[segment] * tail + entry
            return np.where(code >= 0, code, np.where(code == -1, num_rows, tail_row))

        # Segment s begins at start[s] + (s + 1) * tail, its tail right before it.
        shift = tail * np.repeat(np.arange(1, segments.num_segments + 1), segments.length)
        keep = np.arange(num_rows) + shift
        gather = np.empty(num_rows + tail * segments.num_segments, dtype=np.int64)
        gather[keep] = np.arange(num_rows)
        behind = segments.start[:, None] + tail * np.arange(segments.num_segments)[:, None] + np.arange(tail)
        gather[behind] = on_axis(before)
        arrays = (gather, keep, on_axis(cut_tails))
        made = self._convs[width, device] = ConvIndex(*(to_device(array, device, torch.long) for array in arrays))
        return made


@dataclass(frozen=True, slots=True)
class LayerContext:
    """One recurrent function of one layer (`name`) in the micro-batch of `context`.

    is_carried: whether states that enter get gradients, as the walk decided (`Carried`).
    """

    context: TreeContext
    name: str
    is_carried: bool

    @property
    def rows(self) -> TreeRows:
        assert self.context.rows is not None
        return self.context.rows

    def entering(self, anchors: Sequence[torch.Tensor]) -> Float[Tensor, "n ..."] | None:
        """[n, ...] states of the segments that begin below a gateway, in row order; None where there are none.

        anchors: the function's inputs; if one needs gradients, so do the states, as where the walk says so.
        """
        rows, device = self.rows, anchors[0].device
        if not len(rows.schedule.entering):
            return None
        reads = []
        for index, read in enumerate(self.context.reads):
            chosen = rows.entering(index, read.gateway.cut_rows)
            if len(chosen):
                reads.append((read.gateway, rows.tensor(("entering", index), chosen, device)))
        states = _Enter.apply(self.name, tuple(reads), device, *((ANCHOR,) if self.is_carried else anchors))
        return gather(states, rows.tensor("entering order", rows.entering_order, device)) if len(reads) > 1 else states

    def leaving(self, out: Float[Tensor, "..."], states: Float[Tensor, "P ..."] | None) -> Float[Tensor, "..."]:
        """Writes the states after the cuts ([P, ...], or None) to the gateway; `out` carries their gradients."""
        if states is None:
            return out
        if self.context.writes is not None:
            self.context.writes.write_states(self.name, states, self.rows.segments.cut_rows)
        if self.context.injects is not None:
            out = _Leave.apply(out, states, self.context.injects, self.name)
        return out


# -- moving rows and states, with exact gradients ---------------------------------------------------------------------


def spread(
    rows: Float[Tensor, "T ..."], order: Int[Tensor, " Z"], position: Int[Tensor, " T"]
) -> Float[Tensor, "Z ..."]:
    """[Z, ...] rows at their padded positions, zeros where `order` is -1; `position` is the inverse. Each row has one
    position: gradients are copies."""
    return _Spread.apply(rows, order, position)


def collect(
    padded: Float[Tensor, "Z ..."], order: Int[Tensor, " Z"], position: Int[Tensor, " T"]
) -> Float[Tensor, "T ..."]:
    """[T, ...] rows from their padded positions: the transpose of `spread`."""
    return _Collect.apply(padded, order, position)


def gather(rows: Float[Tensor, "T ..."], index: Int[Tensor, " n"]) -> Float[Tensor, "n ..."]:
    """Rows by index; a row may be taken several times; its gradients are summed in float32 or wider."""
    return _Gather.apply(rows, index)


def _padded(rows: torch.Tensor, order: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return rows.new_zeros(len(order), *rows.shape[1:]).index_copy_(0, position, rows)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows: torch.Tensor, order: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(position)
        return _padded(rows, order, position)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, padded: torch.Tensor, order: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order, position)
        return padded.index_select(0, position)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _padded(grad, *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.num_rows, *grad.shape[1:], dtype=wide, device=grad.device)
        (index,) = ctx.saved_tensors
        return total.index_add_(0, index, grad.to(wide)).to(grad.dtype), None


class _Enter(torch.autograd.Function):
    """[n, ...] states kept by gateways, to which their gradients are added. The last arguments are what the layer
    computes with; if one needs gradients, so do states."""

    @staticmethod
    def forward(
        ctx: Context, name: str, reads: Sequence[tuple[Gateway, torch.Tensor]], device: torch.device, *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.name, ctx.reads = name, reads
        kept = [(each.states_on(name, device), index) for each, index in reads]
        return torch.cat([states.index_select(0, index) for states, index in kept])

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[None, ...]:
        reads: Sequence[tuple[Gateway, torch.Tensor]] = ctx.reads
        parts = grad.split([len(index) for _, index in reads])
        for (gateway, index), part in zip(reads, parts, strict=True):
            gateway.add_state_gradients(ctx.name, index, part)
        return (None,) * len(ctx.needs_input_grad)


class _Leave(torch.autograd.Function):
    """An output unchanged, whose backward adds the gradients collected in a gateway to those of states."""

    @staticmethod
    def forward(ctx: Context, out: torch.Tensor, states: torch.Tensor, gateway: Gateway, name: str) -> torch.Tensor:
        ctx.gateway, ctx.name, ctx.dtype, ctx.device = gateway, name, states.dtype, states.device
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        gateway: Gateway = ctx.gateway
        states = gateway.state_grads.get(ctx.name)
        return grad, None if states is None else states.to(ctx.device, non_blocking=True).to(ctx.dtype), None, None
