"""Segments, schedule and index tensors of one micro-batch, computed for its first recurrent layer, shared by all, and
the states that enter and leave each function of a layer through gateways.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from treewise.nn.attention.gateway import ANCHOR
from treewise.nn.attention.interface import TreeContext
from treewise.nn.device import to_device
from treewise.nn.recurrent.segments import (
    RowSegments,
    Schedule,
    make_schedule,
    row_segments,
    rows_before,
    rows_up_to_end,
)
from treewise.nn.recurrent.states import enter, gather, leave
from treewise.planning.layout import Layout
from treewise.planning.planner import Plan
from treewise.shapes import Float, Int


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
    """Segments, schedule and index tensors of micro-batch number `micro_batch` of a plan.

    computed: tokens that each recurrent function of each layer has processed so far, padding not counted.
    """

    plan: Plan
    micro_batch: int
    layout: Layout
    computed: Counter[str] = field(default_factory=Counter)
    _tensors: dict[object, torch.Tensor] = field(default_factory=dict)
    _convs: dict[object, ConvIndex] = field(default_factory=dict)

    @cached_property
    def segments(self) -> RowSegments:
        return row_segments(self.plan, self.micro_batch, self.layout)

    @cached_property
    def schedule(self) -> Schedule:
        return make_schedule(self.segments)

    @property
    def is_one_path(self) -> bool:
        """A single segment that begins with a first token: rows need no arrangement."""
        return self.segments.num_segments == 1 and self.segments.gateway[0] < 0

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
        if (width, device) not in self._convs:
            self._convs[width, device] = self._make_conv_index(width - 1, device)
        return self._convs[width, device]

    def _make_conv_index(self, tail: int, device: torch.device) -> ConvIndex:
        segments, num_rows = self.segments, self.layout.num_tokens
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
        return ConvIndex(*(to_device(array, device, torch.long) for array in arrays))


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

    def count(self) -> None:
        """Adds the micro-batch's tokens to those that this function has processed."""
        self.rows.computed[self.name] += self.rows.layout.num_tokens

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
            kept_at = read.gateway.states[self.name].device
            if len(chosen):
                reads.append((read.gateway, rows.tensor(("entering", index), chosen, kept_at)))
        states = enter(self.name, reads, device, (ANCHOR,) if self.is_carried else anchors)
        return gather(states, rows.tensor("entering order", rows.entering_order, device)) if len(reads) > 1 else states

    def leaving(self, out: Float[Tensor, "..."], states: Float[Tensor, "P ..."] | None) -> Float[Tensor, "..."]:
        """Writes the states after the cuts ([P, ...], or None) to the gateway; `out` carries their gradients."""
        if states is None:
            return out
        if self.context.writes is not None:
            self.context.writes.write_states(self.name, states, self.rows.segments.cut_rows)
        if self.context.injects is not None:
            out = leave(out, states, self.context.injects, self.name)
        return out
