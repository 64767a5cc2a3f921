"""One recurrent function of a layer in one micro-batch: the states that enter and leave it through gateways."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treewise.nn.attention.gateway import ANCHOR
from treewise.nn.attention.interface import TreeContext
from treewise.nn.recurrent.rows import TreeRows
from treewise.nn.recurrent.states import enter, gather, leave
from treewise.shapes import Float


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
