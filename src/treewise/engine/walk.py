"""The depth-first walk over a plan: micro-batches forward and backward, gateways in between.

A walk does not depend on the loss: a callback maps the output of a micro-batch to a scalar, or to None where the
micro-batch has no loss of its own. Autograd adds gradients into the parameters' `.grad`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from treewise.engine.carrying import carried_by, reaches_a_parameter, tower_parameters
from treewise.engine.context_walk import ContextWalk
from treewise.engine.lockstep import Lockstep
from treewise.engine.offload import SavedOnHost
from treewise.engine.sparse_embedding import sparse_embedding_gradients
from treewise.engine.vision import ForestVision
from treewise.errors import UnsupportedModelError
from treewise.nn.attention import EVERYTHING, NOTHING, Carried, Gateway, GatewayRead, TreeContext, TreeMask
from treewise.nn.device import to_device
from treewise.nn.lm_head import AnyHead
from treewise.nn.model import DecoderAndHead, run_decoder
from treewise.nn.recurrent import TreeRows
from treewise.planning.context_parts import ContextPart
from treewise.planning.layout import Layout, lay_out
from treewise.planning.planner import BACKWARD, FORWARD, HOLD, Plan
from treewise.shapes import Float, Int


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchOutput:
    """What one micro-batch computed.

    index: of the micro-batch in the plan. positions: [T] int64 tree positions of its tokens, ascending. hidden: [T, M]
    hidden rows in the model's dtype. router_logits: [T, E] of each layer with a router; empty unless the walk was built
    with `with_router_logits`. head: returns the model's head.
    """

    index: int
    positions: Int[np.ndarray, " T"]
    hidden: Float[Tensor, "T M"]
    router_logits: tuple[Float[Tensor, "T _"], ...]
    head: Callable[[], AnyHead]


LossOf = Callable[[MicroBatchOutput], torch.Tensor | None]


class Walk:
    """One pass, or several, over the micro-batches of one plan.

    Parameters:
        impl: a name of `nn.attention.IMPLEMENTATIONS`.
        temperature: divides the logits of the head.
        offload: gateways and the graphs of held micro-batches wait in host memory.
        lockstep: runs the same passes as other ranks; None on one rank.
        with_router_logits: whether outputs hold the router logits.
        vision: the forest's images; None: it has none.
        context: the ranks that each compute a part of every micro-batch; None: this one computes all.
        for_images: this walk stands for one over trees with images, which it has not: gradients go as far as there.
    """

    def __init__(
        self,
        lm: DecoderAndHead,
        plan: Plan,
        impl: str,
        *,
        temperature: float = 1.0,
        offload: bool = False,
        lockstep: Lockstep | None = None,
        with_router_logits: bool = False,
        vision: ForestVision | None = None,
        context: ContextWalk | None = None,
        for_images: bool = False,
    ) -> None:
        self.lm, self.plan, self.impl, self.context = lm, plan, impl, context
        self.temperature, self.offload, self.lockstep = temperature, offload, lockstep
        self.with_router_logits, self.vision = with_router_logits, vision
        self._layouts: dict[int, tuple[Layout, TreeMask, ContextPart | None]] = {}
        self._tree_rows: dict[int, TreeRows] = {}
        self._gateways: dict[int, Gateway] = {}
        self._held: dict[int, torch.Tensor] = {}
        self._carried = NOTHING  # by micro-batches below others, and by all where ranks must walk alike
        self._alike = lockstep is not None or context is not None or for_images
        if self._alike or not self.has_one_root:
            self._carried = carried_by(lm, with_images=lockstep is not None or for_images)
        self._sees_trained_image: dict[int, bool] = {}  # by micro-batch: in it, or above it
        self._has_gradient = False  # whether a backward of `train` reached a parameter
        self._is_collecting = False  # whether one head accumulates the gradients of all micro-batches
        self._head: AnyHead | None = None

    @property
    def has_one_root(self) -> bool:
        """Whether one backward is all: of a single micro-batch, whose graph holds the features that it reads."""
        return self.plan.is_whole and (self.vision is None or self.vision.is_in_graph)

    def train(self, loss_of: LossOf) -> None:
        """Forward and backward of every micro-batch.

        Raises:
            UnsupportedModelError: nothing that the walk computed requires a gradient.
        """
        self._has_gradient = False
        self._train_all(loss_of)
        has_gradient = float(self._has_gradient)
        if self.context is not None:  # a rank without a trained token may have none where the head alone is trained
            has_gradient = float(self.context.ranks.add_up(torch.tensor(has_gradient, device=self.lm.device)))
        self.require_gradient(bool(has_gradient))

    def require_gradient(self, has_gradient: bool) -> None:
        """Raises `UnsupportedModelError` where nothing that was computed requires a gradient; but trees of text do not
        reach a tower, which may be all that is trained.
        """
        if not has_gradient and not (self.vision is None and any(p.requires_grad for p in tower_parameters(self.lm))):
            raise UnsupportedModelError(
                f"nothing that {type(self.lm.model).__name__} computes on a tree requires a gradient, so a backward "
                "would do nothing. Are the trained parameters in use (an adapter that is active and not disabled)?"
            )

    def _train_all(self, loss_of: LossOf) -> None:
        if self.has_one_root:
            self._train(loss_of)
            return
        self._is_collecting = True
        with sparse_embedding_gradients(self.lm):
            if self.vision is not None:
                self.vision.begin_training()
            self._train(loss_of)
            if self.vision is not None:
                self.vision.backward()
        if self._head is not None and self._head.gradients is not None:
            self._head.gradients.join()
        self._head, self._is_collecting = None, False

    @torch.no_grad()
    def visit(self, use: Callable[[MicroBatchOutput], object]) -> None:
        """Forward of every micro-batch once, without a graph; `use` is called on each output."""
        turns = repeat(None) if self.lockstep is None else self.lockstep.forwards(self.plan)
        for step in self.plan.schedule:
            index = step.micro_batch
            is_open = self.plan.micro_batches[index].is_open
            if step.action in (FORWARD, HOLD):
                next(turns)
                use(self._open(index))
            elif is_open:
                self._close(index)
            else:
                next(turns)
                use(self._run(index))
                self._close(index)
        next(turns, None)

    @property
    def is_one_graph(self) -> bool:
        """Whether the caller's graph can hold the whole walk: all in one graph, and no rank to keep in step with."""
        return self.has_one_root and self.lockstep is None and self.context is None

    @property
    def counts_at_once(self) -> bool:
        """Whether the first micro-batch shows this rank all tokens of the plan."""
        return self.plan.is_whole and self.context is None

    def whole_output(self) -> MicroBatchOutput:
        """The output of the only micro-batch, in the caller's graph."""
        assert self.has_one_root
        return self._run(0)

    def _train(self, loss_of: LossOf) -> None:
        for step in self.plan.schedule if self.lockstep is None else self.lockstep.steps(self.plan):
            index = step.micro_batch
            if step.action == FORWARD:
                with torch.no_grad():
                    self._open(index)
            elif step.action == HOLD:
                with self._graph_offloaded():
                    self._held[index] = _root(self._open(index, keep_graph=True), loss_of)
            elif step.action == BACKWARD:
                self._backward(self._held.pop(index))
                self._close(index)
            else:
                self._backward(_root(self._run(index), loss_of))
                self._close(index)

    def _backward(self, root: torch.Tensor) -> None:
        if root.requires_grad:
            self._has_gradient = self._has_gradient or reaches_a_parameter(root)
            torch.autograd.backward(root, torch.zeros_like(root) if root.dim() else None)

    def _graph_offloaded(self) -> AbstractContextManager[object]:
        """Around the forward of a held micro-batch: its saved tensors wait on the host, if asked for."""
        if self.offload and self.lm.device.type != "cpu":
            return SavedOnHost(self.lm.model)
        return nullcontext()

    def _layout(self, index: int) -> tuple[Layout, TreeMask, ContextPart | None]:
        if index not in self._layouts:
            layout, part = lay_out(self.plan, index), None
            is_seen = self.vision is not None and self.vision.is_trained_on(layout.positions)
            self._sees_trained_image[index] = is_seen or self._is_below_trained_image(layout)
            if self.context is not None:
                part = self.context.part(layout)
                layout = part.layout
            mask = TreeMask.from_layout(layout) if self.vision is None else self.vision.mask(layout)
            self._layouts[index] = layout, mask, part
        return self._layouts[index]

    def _is_below_trained_image(self, layout: Layout) -> bool:
        return any(self._sees_trained_image[above] for above, _ in layout.gateway)

    def _carried_in(self, layout: Layout) -> Carried:
        """What a micro-batch's gradients have to reach beyond its own parameters."""
        if self._is_below_trained_image(layout):
            return EVERYTHING
        return self._carried if layout.gateway or self._alike else NOTHING

    def _open(self, index: int, *, keep_graph: bool = False) -> MicroBatchOutput:
        """Runs an open micro-batch and leaves its gateway."""
        gateway = self._gateways[index] = Gateway(self.offload)
        return self._run(index, writes=gateway, injects=gateway if keep_graph else None)

    def _run(self, index: int, writes: Gateway | None = None, injects: Gateway | None = None) -> MicroBatchOutput:
        layout, mask, part = self._layout(index)
        if writes is None and self.plan.micro_batches[index].is_open:
            injects = self._gateways[index]
        reads = tuple(self._read(above, rows) for above, rows in layout.gateway)
        tree_rows = self._tree_rows.setdefault(index, TreeRows(self.plan, index, layout))
        exchange = None
        if self.context is not None and part is not None:
            exchange = self.context.exchange(part, self.lm.device)
        carried = self._carried_in(layout)
        context = TreeContext(mask, self.impl, reads, writes, injects, tree_rows, exchange, carried)
        hidden, router_logits = run_decoder(
            self.lm,
            layout.token_ids,
            layout.depth,
            context,
            with_router_logits=self.with_router_logits,
            inside=None if self.vision is None else self.vision.inside(layout.positions),
        )
        positions = layout.positions
        if part is not None:
            positions, hidden = positions[: part.num_own], hidden[: part.num_own]
            router_logits = tuple(each[: part.num_own] for each in router_logits)
        return MicroBatchOutput(index, positions, hidden, router_logits, self._make_head)

    def _make_head(self) -> AnyHead:
        if not self._is_collecting:
            return self.lm.head(self.temperature)
        if self._head is None:
            self._head = self.lm.head(self.temperature).collecting()
        return self._head

    def _read(self, above: int, rows: np.ndarray) -> GatewayRead:
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return GatewayRead(self._gateways[above], slice(first, last + 1), len(rows))
        return GatewayRead(self._gateways[above], to_device(rows, self.lm.device), len(rows))

    def _close(self, index: int) -> None:
        self._gateways.pop(index, None)
        self._layouts.pop(index, None)
        self._tree_rows.pop(index, None)


def _root(output: MicroBatchOutput, loss_of: LossOf) -> torch.Tensor:
    """The tensor that a micro-batch's backward starts from."""
    loss = loss_of(output)
    # Without a loss of its own an open micro-batch still carries the gradients of its gateway.
    if loss is None:
        return output.hidden
    if output.router_logits:
        # A loss on routers alone would not reach the hidden rows. FSDP2 gathers the parameters of a layer when a
        # gradient reaches its output, so there must be one, if only of zeros.
        return loss + (output.hidden * 0).sum().to(loss.dtype)
    return loss
