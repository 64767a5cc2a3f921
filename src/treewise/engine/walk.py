"""The depth-first walk over a plan: micro-batches forward and backward, gateways in between.

A walk does not depend on the loss: a callback maps the output of a micro-batch to a scalar, or to None where the
micro-batch has no loss of its own. Autograd adds gradients into the parameters' `.grad`. Images, other ranks and the
memory of the host join it as guests (`engine.guest`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treewise.engine.guest import ForwardInputs, Guest, Piece
from treewise.errors import UnsupportedModelError, tell_progress
from treewise.nn.attention import ANCHOR, EVERYTHING, NOTHING, Carried, Gateway, GatewayRead, TreeContext, TreeMask
from treewise.nn.device import to_device
from treewise.nn.lm_head import AnyHead
from treewise.nn.model import DecoderAndHead, base_model, run_decoder
from treewise.nn.recurrent import TreeRows
from treewise.planning.layout import lay_out
from treewise.planning.planner import BACKWARD, FORWARD, HOLD, TRAIN, Pass, Plan
from treewise.shapes import Float, Int

# -- What a gradient has to reach above a micro-batch: decided once for a walk, from the plan and what is trained -----


# Names in decoders. Layers and last norms of other names count as what is before the layers: exact, at a higher cost.
_LAYERS = {"layers", "h", "block", "blocks"}
_LAST_NORMS = {"norm", "norm_f", "ln_f", "final_norm", "final_layernorm", "final_layer_norm"}


def carried_by(lm: DecoderAndHead, *, with_images: bool) -> Carried:
    """Which layers carry gradients to gateways.

    with_images: input rows may hold features of images, so a tower that is trained counts.
    """
    if _is_trained(lm.decoder.get_input_embeddings()):
        return EVERYTHING
    # In the order in which they run; none where they do not stand in one list of a known name.
    lists = [each for name, each in lm.decoder.named_children() if name in _LAYERS]
    layers = list(lists[0]) if len(lists) == 1 and isinstance(lists[0], nn.ModuleList) else []
    after = [lm.output, *(each for name, each in lm.decoder.named_children() if name in _LAST_NORMS)]
    known = {parameter for each in (*layers, *after) for parameter in each.parameters()}
    if not with_images:
        known.update(tower_parameters(lm))
    if any(each.requires_grad and each not in known for each in lm.model.parameters()):
        return EVERYTHING
    first = next((index for index, layer in enumerate(layers) if _is_trained(layer)), None)
    if first is None:
        return NOTHING
    at_or_after = {module for layer in layers[first:] for module in layer.modules()}
    before = {module for layer in layers[:first] for module in layer.modules()} - at_or_after
    return Carried(from_layer=True, before=frozenset(before))


def tower_parameters(lm: DecoderAndHead) -> list[nn.Parameter]:
    """The parameters of a model's towers and projectors; none of a model of text."""
    base: Any = base_model(lm.model)
    inside = set(lm.decoder.parameters())
    return [each for each in base.base_model.parameters() if each not in inside]


def reaches_a_parameter(root: torch.Tensor) -> bool:
    """Whether a backward from a tensor ends in a leaf that is trained, not only at what is carried above."""
    nodes, seen = [root.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", ANCHOR) is not ANCHOR:
            return True
        nodes += [each for each, _ in node.next_functions]
    return False


def _is_trained(module: nn.Module) -> bool:
    return any(each.requires_grad for each in module.parameters())


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
        guests: what joins the walk; none on one rank, for text, with all in the device's memory.
        temperature: divides the logits of the head.
        with_router_logits: whether outputs hold the router logits.
    """

    def __init__(
        self,
        lm: DecoderAndHead,
        plan: Plan,
        impl: str,
        guests: Sequence[Guest] = (),
        *,
        temperature: float = 1.0,
        with_router_logits: bool = False,
    ) -> None:
        self.lm, self.plan, self.impl, self.guests = lm, plan, impl, guests
        self.temperature, self.with_router_logits = temperature, with_router_logits
        self.in_lockstep = any(each.in_lockstep for each in guests)
        self._splits_pieces = any(each.splits_pieces for each in guests)
        # Whether one backward is all: of a single micro-batch, whose graph holds what it reads.
        self.has_one_root = plan.is_whole and all(each.is_in_graph for each in guests)
        self._pieces: dict[int, Piece] = {}
        self._tree_rows: dict[int, TreeRows] = {}
        self._gateways: dict[int, Gateway] = {}
        self._held: dict[int, torch.Tensor] = {}
        meets_images = self.in_lockstep or any(each.may_meet_images for each in guests)
        self._alike = meets_images or self._splits_pieces  # all pieces carry what one of them has to
        self._carried = NOTHING  # by micro-batches below others, and by all where they are alike
        if self._alike or not self.has_one_root:
            self._carried = carried_by(lm, with_images=meets_images)
        self._has_gradient = False  # whether a backward of `train` reached a parameter
        self._is_collecting = False  # whether one head accumulates the gradients of all micro-batches
        self._head: AnyHead | None = None

    @property
    def is_one_graph(self) -> bool:
        """Whether the caller's graph can hold the whole walk: all in one graph, and no rank to keep in step with."""
        return self.has_one_root and not self.in_lockstep and not self._splits_pieces

    @property
    def counts_at_once(self) -> bool:
        """Whether the first micro-batch shows this rank all tokens of the plan."""
        return self.plan.is_whole and not self._splits_pieces

    def train(self, loss_of: LossOf) -> None:
        """Forward and backward of every micro-batch.

        Raises:
            UnsupportedModelError: nothing that the walk computed requires a gradient.
        """
        self._has_gradient = False
        with ExitStack() as around:
            if not self.has_one_root:
                self._is_collecting = True
                around.enter_context(_sparse_embedding_gradients(self.lm))
                for guest in self.guests:
                    around.enter_context(guest.training())
            passes: Iterable[Pass] = self.plan.schedule
            for guest in self.guests:
                passes = guest.passes(self.plan, passes)
            for step in followed("forward and backward", self.plan, passes, _trained):
                self._pass(step, loss_of)
        if self._head is not None and self._head.gradients is not None:
            self._head.gradients.join()
        self._head, self._is_collecting = None, False
        has_gradient = self._has_gradient
        if self._splits_pieces:  # a rank without a trained token may have none where the head alone is trained
            has_gradient = bool(self.add_up(torch.tensor(float(has_gradient), device=self.lm.device)))
        self.require_gradient(has_gradient)

    def require_gradient(self, has_gradient: bool) -> None:
        """Raises `UnsupportedModelError` where nothing that was computed requires a gradient; but trees of text do not
        reach a tower, which may be all that is trained.
        """
        if has_gradient:
            return
        has_images = any(each.brings_images for each in self.guests)
        if has_images or not any(each.requires_grad for each in tower_parameters(self.lm)):
            raise UnsupportedModelError(
                f"nothing that {type(self.lm.model).__name__} computes on a tree requires a gradient, so a backward "
                "would do nothing. Are the trained parameters in use (an adapter that is active and not disabled)?"
            )

    @torch.no_grad()
    def visit(self, use: Callable[[MicroBatchOutput], object]) -> None:
        """Forward of every micro-batch once, without a graph; `use` is called on each output."""
        turns: Iterator[None] = repeat(None)
        for guest in self.guests:
            turns = guest.turns(self.plan, turns)
        for step in followed("forward", self.plan, self.plan.schedule, _visited):
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

    def whole_output(self) -> MicroBatchOutput:
        """The output of the only micro-batch, in the caller's graph."""
        assert self.has_one_root
        has_backward, num_tokens = torch.is_grad_enabled(), self.plan.forest.num_tokens
        what = "forward and backward" if has_backward else "forward"
        tell_progress(what, 0, num_tokens)
        output = self._run(0)
        tell_progress(what, num_tokens // 3 if has_backward else num_tokens, num_tokens)  # the rest is the caller's
        return output

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that compute parts of one micro-batch; all of them call this."""
        for guest in self.guests:
            tensor = guest.add_up(tensor)
        return tensor

    def _pass(self, step: Pass, loss_of: LossOf) -> None:
        index = step.micro_batch
        if step.action == FORWARD:
            with torch.no_grad():
                self._open(index)
            return
        if step.action == HOLD:
            with ExitStack() as around:
                for guest in self.guests:
                    around.enter_context(guest.holding(self.lm))
                self._held[index] = _root(self._open(index, keep_graph=True), loss_of)
            return
        root = self._held.pop(index) if step.action == BACKWARD else _root(self._run(index), loss_of)
        if root.requires_grad:
            self._has_gradient = self._has_gradient or reaches_a_parameter(root)
            torch.autograd.backward(root, torch.zeros_like(root) if root.dim() else None)
        self._close(index)

    def _open(self, index: int, *, keep_graph: bool = False) -> MicroBatchOutput:
        """Runs an open micro-batch and leaves its gateway."""
        gateway = self._gateways[index] = Gateway(any(each.keeps_on_host for each in self.guests))
        return self._run(index, writes=gateway, injects=gateway if keep_graph else None)

    def _run(self, index: int, writes: Gateway | None = None, injects: Gateway | None = None) -> MicroBatchOutput:
        piece = self._pieces.get(index)
        if piece is None:
            layout = lay_out(self.plan, index)
            piece = self._pieces[index] = Piece(layout, TreeMask.from_layout(layout))
            for guest in self.guests:
                guest.join(piece)
        layout, inputs = piece.layout, ForwardInputs()
        for guest in self.guests:
            guest.enter(piece, inputs)
        if writes is None and self.plan.micro_batches[index].is_open:
            injects = self._gateways[index]
        gateway = layout.gateway
        # What its gradients have to reach beyond its own parameters.
        carried = self._carried if gateway or self._alike else NOTHING
        if any(self._pieces[above].sees_trained_image for above, _ in gateway):
            carried = EVERYTHING
        context = TreeContext(
            piece.mask,
            self.impl,
            tuple(self._read(above, rows) for above, rows in gateway),
            writes,
            injects,
            self._tree_rows.setdefault(index, TreeRows(self.plan, index, layout)),
            inputs.exchange,
            carried,
        )
        hidden, router_logits = run_decoder(
            self.lm,
            layout.token_ids,
            layout.depth,
            context,
            with_router_logits=self.with_router_logits,
            inside=inputs.inside,
        )
        positions = layout.positions
        if piece.part is not None:
            own = piece.part.num_own
            positions, hidden, router_logits = (
                positions[:own],
                hidden[:own],
                tuple(each[:own] for each in router_logits),
            )
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
        self._pieces.pop(index, None)
        self._tree_rows.pop(index, None)


# -- How far a walk is, for whoever listens ---------------------------------------------------------------------------


def _trained(plan: Plan, step: Pass) -> int:
    """Forwards over a token that a pass of a training is worth; a backward is two."""
    return plan.micro_batches[step.micro_batch].num_tokens * {FORWARD: 1, HOLD: 1, BACKWARD: 2, TRAIN: 3}[step.action]


def _visited(plan: Plan, step: Pass) -> int:
    """The same of a visit, which runs each micro-batch once."""
    batch = plan.micro_batches[step.micro_batch]
    return 0 if step.action == BACKWARD or (step.action == TRAIN and batch.is_open) else batch.num_tokens


def followed(what: str, plan: Plan, passes: Iterable[Pass], work: Callable[[Plan, Pass], int]) -> Iterator[Pass]:
    """The passes of a walk; before the first and after each, whoever listens gets how many tokens are done."""
    done, total, num_tokens = 0, sum(work(plan, step) for step in plan.schedule), plan.forest.num_tokens
    tell_progress(what, 0, num_tokens)
    for step in passes:
        yield step
        done += work(plan, step)
        tell_progress(what, num_tokens * done // total, num_tokens)


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


@contextmanager
def _sparse_embedding_gradients(lm: DecoderAndHead) -> Iterator[None]:
    """On a CPU, each micro-batch's gradient of the input embedding has the rows of its tokens, not the vocabulary's.

    `.grad` itself stays dense. Embeddings of another kind (adapters, shards) stay as they are.
    """
    module = lm.decoder.get_input_embeddings()
    weight: Any = module.weight if isinstance(module, nn.Embedding) else None
    is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu"
    if not is_plain or module.sparse or not weight.requires_grad:
        yield
        return
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    module.sparse = True
    try:
        yield
    finally:
        module.sparse = False
