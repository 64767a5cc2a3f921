"""The depth-first walk over a plan: micro-batches forward and backward, gateways in between.

A walk is blind to the loss: a callback maps the hidden rows of a micro-batch to a scalar, or to None where it has no
loss of its own. Gradients are added into the parameters' `.grad` by autograd.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat

import numpy as np
import torch

from treewise.engine.lockstep import Pace
from treewise.nn.attention import Gateway, GatewayRead, TreeContext, TreeMask
from treewise.nn.device import to_device
from treewise.nn.lm_head import Head
from treewise.nn.model import ModelParts, decoder_rows, sparse_embedding_gradients
from treewise.nn.recurrent import TreeRows
from treewise.planning.layout import Edges, Layout, edges_of, lay_out
from treewise.planning.planner import BACKWARD, FORWARD, HOLD, Plan

LossOf = Callable[[int, torch.Tensor], torch.Tensor | None]


class Walk:
    """One pass, or several, over the micro-batches of one plan."""

    def __init__(
        self,
        parts: ModelParts,
        plan: Plan,
        impl: str,
        offload: bool = False,
        pace: Pace | None = None,
    ) -> None:
        self.parts, self.plan, self.offload, self.pace = parts, plan, offload, pace
        self.impl = impl
        self._layouts: dict[int, tuple[Layout, TreeMask]] = {}
        self._tree_rows: dict[int, TreeRows] = {}
        self._gateways: dict[int, Gateway] = {}
        self._held: dict[int, torch.Tensor] = {}
        # Where wanted: the router logits of the micro-batch that ran last, a tensor [T, E] for each layer.
        self.wants_router_logits = False
        self.router_logits: tuple[torch.Tensor, ...] = ()
        self._heads: dict[float, Head] | None = None

    def edges(self, number: int, is_needed: np.ndarray) -> Edges:
        """The needed edges that leave a micro-batch."""
        return edges_of(self.plan.forest, self._layout(number)[0].positions, is_needed)

    def positions(self, number: int) -> np.ndarray:
        """[n] tree positions of a micro-batch's tokens, ascending."""
        return self._layout(number)[0].positions

    def head(self, temperature: float) -> Head:
        """The model's head. While several micro-batches train it is made once and collects its own gradients."""
        if self._heads is None:
            return self.parts.head(temperature)
        if temperature not in self._heads:
            self._heads[temperature] = self.parts.head(temperature).collecting()
        return self._heads[temperature]

    def train(self, loss_of: LossOf) -> None:
        """Forward and backward of every micro-batch."""
        if self.plan.is_whole:
            self._train(loss_of)
            return
        self._heads = {}
        with sparse_embedding_gradients(self.parts):
            self._train(loss_of)
        for head in self._heads.values():
            assert head.gradients is not None
            head.gradients.join()
        self._heads = None

    def _train(self, loss_of: LossOf) -> None:
        for step in self.plan.schedule if self.pace is None else self.pace.steps(self.plan):
            number = step.micro_batch
            if step.action == FORWARD:
                with torch.no_grad():
                    self._open(number)
            elif step.action == HOLD:
                with self._graph_kept():
                    self._held[number] = self._root(number, self._open(number, keep_graph=True), loss_of)
            elif step.action == BACKWARD:
                _backward(self._held.pop(number))
                self._close(number)
            else:
                _backward(self._root(number, self._rows(number), loss_of))
                self._close(number)

    @torch.no_grad()
    def visit(self, use: Callable[[int, torch.Tensor], object]) -> None:
        """Forward of every micro-batch once, without a graph; `use` gets the hidden rows of each."""
        turns = repeat(None) if self.pace is None else self.pace.forwards(self.plan)
        for step in self.plan.schedule:
            number = step.micro_batch
            is_open = self.plan.micro_batches[number].is_open
            if step.action in (FORWARD, HOLD):
                next(turns)
                use(number, self._open(number))
            elif is_open:
                self._close(number)
            else:
                next(turns)
                use(number, self._rows(number))
                self._close(number)
        next(turns, None)

    def whole_rows(self) -> torch.Tensor:
        """[T, M] hidden rows of the only micro-batch, in the caller's graph."""
        return self._rows(0)

    def _graph_kept(self) -> AbstractContextManager[object]:
        """Where the graph of a held micro-batch waits."""
        if self.offload and self.parts.device.type != "cpu":
            return torch.autograd.graph.save_on_cpu(pin_memory=True)
        return nullcontext()

    def _layout(self, number: int) -> tuple[Layout, TreeMask]:
        if number not in self._layouts:
            layout = lay_out(self.plan, number)
            self._layouts[number] = layout, TreeMask.from_layout(layout)
        return self._layouts[number]

    def _open(self, number: int, keep_graph: bool = False) -> torch.Tensor:
        """Runs an open micro-batch and leaves its gateway."""
        gateway = self._gateways[number] = Gateway(self.offload)
        return self._rows(number, writes=gateway, injects=gateway if keep_graph else None)

    def _rows(self, number: int, writes: Gateway | None = None, injects: Gateway | None = None) -> torch.Tensor:
        layout, mask = self._layout(number)
        if writes is None and self.plan.micro_batches[number].is_open:
            injects = self._gateways[number]
        reads = tuple(self._read(above, rows) for above, rows in layout.gateway)
        tree_rows = self._tree_rows.setdefault(number, TreeRows(self.plan, number, layout))
        context = TreeContext(mask, self.impl, reads, writes, injects, tree_rows)
        context.wants_router_logits = self.wants_router_logits
        found = decoder_rows(self.parts, layout.token_ids, layout.depth, context)
        self.router_logits = context.router_logits
        return found

    def _read(self, above: int, rows: np.ndarray) -> GatewayRead:
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return GatewayRead(self._gateways[above], slice(first, last + 1), len(rows))
        return GatewayRead(self._gateways[above], to_device(rows, self.parts.device), len(rows))

    def _root(self, number: int, rows: torch.Tensor, loss_of: LossOf) -> torch.Tensor:
        """What the backward of a micro-batch starts from."""
        loss = loss_of(number, rows)
        # Without a loss of its own an open micro-batch still carries the gradients of its gateway.
        return rows if loss is None else loss

    def _close(self, number: int) -> None:
        self._gateways.pop(number, None)
        self._layouts.pop(number, None)
        self._tree_rows.pop(number, None)


def _backward(root: torch.Tensor) -> None:
    if not root.requires_grad:
        return
    torch.autograd.backward(root, torch.zeros_like(root) if root.dim() else None)
