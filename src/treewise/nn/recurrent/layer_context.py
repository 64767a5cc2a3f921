"""Where in a model, and in which micro-batch, a recurrent function runs: what enters and leaves it through gateways."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treewise.nn.attention.interface import TreeContext
from treewise.nn.recurrent.rows import TreeRows
from treewise.nn.recurrent.states import enter, gather, leave


@dataclass(frozen=True, slots=True)
class Place:
    """One recurrent function of one layer (`name`) in the micro-batch of `context`."""

    context: TreeContext
    name: str

    @property
    def rows(self) -> TreeRows:
        assert self.context.rows is not None
        return self.context.rows

    def count(self) -> None:
        self.rows.computed[self.name] += self.rows.layout.num_tokens

    def entering(self, anchors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """[n, ...] states of the segments that begin below a gateway, in row order; None where there are none."""
        rows, device = self.rows, anchors[0].device
        if not len(rows.schedule.entering):
            return None
        reads = []
        for index, read in enumerate(self.context.reads):
            chosen = rows.entering(index, read.gateway.cut_rows)
            kept_at = read.gateway.states[self.name].device
            if len(chosen):
                reads.append((read.gateway, rows.tensor(("entering", index), chosen, kept_at)))
        states = enter(self.name, reads, device, anchors)
        return gather(states, rows.tensor("entering order", rows.entering_order, device)) if len(reads) > 1 else states

    def leaving(self, out: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Hands the states after the cuts ([P, ...], None without cuts) to the gateway; takes back their gradients."""
        if states is None:
            return out
        if self.context.writes is not None:
            self.context.writes.write_states(self.name, states, self.rows.segments.cut_rows)
        if self.context.injects is not None:
            out = leave(out, states, self.context.injects, self.name)
        return out
