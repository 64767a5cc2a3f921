"""A training step on trees of tokens, told once from top to bottom; `TreeEngine.step` is this routine.

    take_step     a forest is planned, walked, reported; the same again with less memory where it ran out
    Walk.train    the passes over its micro-batches, depth first
    Walk.forward  one micro-batch: its mask, what it reads of those above it, the model
    StepLoss      log-probs of edges (`edge_scorer`), the objective's losses of tokens, their sum

A token's log-prob is an edge from its parent, so a shared token is computed once and stands in the losses of all its
trajectories: gradients add up at it, which is the *gradient restoration* of Tree Training (arXiv 2511.00413). A tree
beyond memory is walked depth first (AReaL-DTA, arXiv 2602.00482); a micro-batch that others hang from leaves a
*gateway*, the keys and values that they read and the gradients that they send back, so each token below is computed
forward and backward once, in full micro-batches.

`examples/tiny_treewise.py` is this in one file without transformers: `tree_backward` takes the step, `run` is a
micro-batch (`Walk.forward`), `partition` the plan.

Left out on purpose: images, recurrent layers, router losses, other ranks and host memory, which join as guests
(`nn.guest`); losses that need all log-probs at once, which walk twice (`engine.values`).

Letters: T tokens of a micro-batch, M model width, E edges or terms of a micro-batch, P terms of a forest.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import repeat
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from treewise.base import features
from treewise.base.progress import listeners
from treewise.base.shapes import Float, Int
from treewise.engine.carried import carried_by, reaches_a_parameter, refuse_no_gradient
from treewise.engine.edge_scorer import EdgeScorer, Entries, Values
from treewise.engine.prepared import AUTO, Budget, StepOutput
from treewise.errors import ConfigError, DataError, OutOfMemoryError
from treewise.nn.attention import EVERYTHING, NOTHING, Gateway, GatewayRead, TreeContext, TreeMask
from treewise.nn.decoder import DecoderAndHead, run_decoder
from treewise.nn.gradients import clear_gradients, gradients_set_aside, hooks_run_once, sparse_embedding_gradients
from treewise.nn.guest import Guest, MicroBatchOutput, RunningMicroBatch, add_up, replay_of
from treewise.nn.lm_head import AnyHead
from treewise.nn.platform.tensors import is_out_of_memory, to_device
from treewise.objectives.protocol import Objective, Terms
from treewise.objectives.sft import described
from treewise.planning.plans import BACKWARD, FORWARD, HOLD, Pass, Plan, lay_out
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")

LossOf = Callable[[MicroBatchOutput], Tensor | None]
T = TypeVar("T")


# -- the step ---------------------------------------------------------------------------------------------------------


def take_step(
    begin: Callable[[], "tuple[Walk, Loss]"],
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    budget: Budget,
    num_tokens: int,
) -> StepOutput:
    """Forward and backward of a forest; gradients are added into `.grad`, and hooks on them run once, in the end.

    begin: plans the forest under the present budget; the walk over that plan, and the loss. parameters: the model's.
    num_tokens: of the forest.

    Raises:
        OutOfMemoryError: see `with_less_memory`.
    """

    def attempt() -> StepOutput:
        walk, loss = begin()
        with walk.all_or_nothing():
            loss.backward(walk)
        return loss.output(walk)

    with hooks_run_once(model, parameters):
        return with_less_memory(attempt, budget, num_tokens, parameters)


def with_less_memory(
    attempt: Callable[[], T], budget: Budget, num_tokens: int, parameters: Sequence[nn.Parameter] = ()
) -> T:
    """Runs a step of `num_tokens`, and again at half the budget while it runs out of memory, with the same result.

    parameters: to whose gradients it adds. What an attempt added is dropped; the gradients of earlier calls are kept,
    with `max_tokens="auto"`.

    Raises:
        OutOfMemoryError: at a budget of one token, or if `.grad` also holds gradients of earlier calls, which can only
            be kept apart with `max_tokens="auto"`.
    """
    is_auto = budget.setting == AUTO
    is_fresh = is_auto or all(parameter.grad is None for parameter in parameters)
    with gradients_set_aside(parameters) if is_auto else nullcontext():
        while True:
            try:
                return attempt()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not budget.recovers:
                    raise
                reason = str(error).splitlines()[0]
            used = num_tokens if budget.tokens is None else min(budget.tokens, num_tokens)
            if not is_fresh:
                raise OutOfMemoryError(
                    f"out of memory with {used:,} tokens at a time, and .grad now holds a part of this step. Zero it, "
                    f"lower max_tokens (the gradients stay the same), or use max_tokens='auto', which recovers. "
                    f"({reason})"
                )
            if used <= 1:
                raise OutOfMemoryError(f"out of memory even with one token at a time. ({reason})")
            budget.tokens = used // 2
            logger.warning("out of memory with %d tokens at a time; the same step again with %d", used, budget.tokens)
            clear_gradients(parameters)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


# -- the walk: passes over the micro-batches of one plan -------------------------------------------------------------


class Walk:
    """One pass, or several, over the micro-batches of a plan: `train`, and `visit` before it or alone.

    Parameters:
        impl: a name of `nn.attention.IMPLEMENTATIONS`.
        guests: what joins the walk; none on one rank, for text, with all in the device's memory.
        temperature: divides the logits of the head.
        reads_routers: whether outputs hold router logits; where a guest reads them they do.
    """

    def __init__(
        self,
        lm: DecoderAndHead,
        plan: Plan,
        impl: str,
        guests: Sequence[Guest] = (),
        *,
        temperature: float = 1.0,
        reads_routers: bool = False,
    ) -> None:
        if lm.is_recurrent:
            guests = [*guests, features.recurrent.RecurrentRows(plan)]
        self.lm, self.plan, self.impl, self.guests, self.temperature = lm, plan, impl, guests, temperature
        self.reads_routers = reads_routers or any(guest.reads_routers for guest in guests)
        self.in_lockstep = any(guest.in_lockstep for guest in guests)
        self.splits_tokens = any(guest.splits_tokens for guest in guests)
        self.within_backward = next((guest.within_backward for guest in guests if guest.within_backward), None)
        # Whether one backward is all: of a single micro-batch, whose graph holds what it reads.
        self.has_one_root = plan.is_whole and all(guest.is_in_graph for guest in guests)
        # Whether the caller's graph can hold the whole walk: all in one graph, and no rank to keep in step with.
        self.is_one_graph = self.has_one_root and not self.in_lockstep and not self.splits_tokens
        self.num_visits = 0
        self._running: dict[int, RunningMicroBatch] = {}
        meets_images = self.in_lockstep or any(guest.may_meet_images for guest in guests)
        self._alike = meets_images or self.splits_tokens  # all micro-batches carry what one of them has to
        self._carried = NOTHING  # by micro-batches below others, and by all where they are alike
        if self._alike or not self.has_one_root:
            self._carried = carried_by(lm, with_images=meets_images)
        self._collects = False
        self._head: AnyHead | None = None  # one of all micro-batches, while it collects their gradients

    @property
    def num_computed_tokens(self) -> int:
        """Forwards of tokens in a step, recomputed ones included."""
        plan = self.plan
        return plan.num_computed_tokens + (0 if plan.is_whole else self.num_visits * plan.forest.num_tokens)

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """What a step's gradients are computed in."""
        return nullcontext()

    def train(self, loss_of: LossOf) -> None:
        """Forward and backward of every micro-batch. Autograd adds gradients into the parameters' `.grad`.

        loss_of: maps the output of a micro-batch to a scalar; None where it has no loss of its own.

        Raises:
            UnsupportedModelError: nothing that the walk computed requires a gradient.
        """
        if not (self.plan.is_whole and not self.splits_tokens) and any(guest.needs_visit for guest in self.guests):
            self.visit(lambda _: None)
        has_gradient = False
        with ExitStack() as around:
            if not self.has_one_root or self.lm.collects_parts:
                around.enter_context(self._one_head())
            if not self.has_one_root:
                if self.within_backward is None:  # whose hooks take gradients of one kind
                    around.enter_context(sparse_embedding_gradients(self.lm.decoder.get_input_embeddings()))
                for guest in self.guests:
                    around.enter_context(guest.training())
            passes: Iterable[Pass] = self.plan.schedule
            for guest in self.guests:
                passes = guest.passes(self.plan, passes)
            for step in passes if not listeners else self.plan.told(passes, trains=True):
                index = step.micro_batch
                if step.action == FORWARD:  # no graph: what runs below reads its keys and values
                    with torch.no_grad():
                        self.forward(index, leaves_gateway=True)
                    continue
                if step.action == HOLD:  # its graph stays until the gradients of all below it have come
                    with ExitStack() as held:
                        for guest in self.guests:
                            held.enter_context(guest.holding(self.lm))
                        root = self._root(self.forward(index, leaves_gateway=True), loss_of)
                    self._running[index].root = root
                    continue
                held_root = self._running[index].root if step.action == BACKWARD else None
                root = self._root(self.forward(index), loss_of) if held_root is None else held_root
                if root.requires_grad:
                    # What is carried above requires gradients, too, trained or not.
                    has_gradient = has_gradient or self.is_one_graph or reaches_a_parameter(root)
                    torch.autograd.backward(root, torch.zeros_like(root) if root.dim() else None)
                del self._running[index], root, held_root
        if self.splits_tokens:  # a rank without a trained token may have none where the head alone is trained
            has_gradient = bool(self.add_up(torch.tensor(float(has_gradient), device=self.lm.device)))
        if not has_gradient:
            refuse_no_gradient(self.lm, self.guests)

    @torch.no_grad()
    def visit(self, use: Callable[[MicroBatchOutput], object]) -> None:
        """Forward of every micro-batch once, without a graph; `use` is called on each output."""
        turns: Iterator[None] = repeat(None)
        for guest in self.guests:
            turns = guest.turns(self.plan, turns)
        for step in self.plan.schedule if not listeners else self.plan.told(self.plan.schedule, trains=False):
            index = step.micro_batch
            is_open = self.plan.micro_batches[index].is_open
            if step.action in (FORWARD, HOLD) or not is_open:
                next(turns)
                output = self.forward(index, leaves_gateway=is_open)
                for guest in self.guests:
                    guest.loss(output)
                use(output)
                del output
            if step.action not in (FORWARD, HOLD):
                del self._running[index]
        next(turns, None)
        for guest in self.guests:
            guest.end_visit()
        self.num_visits += 1

    # -- one micro-batch --------------------------------------------------------------------------------------------

    def forward(self, index: int, *, leaves_gateway: bool = False) -> MicroBatchOutput:
        """One micro-batch of the plan: its tokens, the keys of the paths above them, the model."""
        run = self._running.get(index)
        if run is None:
            layout = lay_out(self.plan, index)
            run = self._running[index] = RunningMicroBatch(index, layout, TreeMask.from_layout(layout))
            for guest in self.guests:
                guest.join(run)
        for guest in self.guests:
            guest.enter(run)
        if leaves_gateway:
            run.gateway = Gateway(any(guest.keeps_on_host for guest in self.guests))
        layout, reads = run.layout, []
        # What its gradients have to reach beyond its own parameters.
        carried = self._carried if len(layout.gateway_rows) or self._alike else NOTHING
        for number, above in enumerate(layout.gateway_batches.tolist()):
            rows = layout.gateway_rows[layout.gateway_bounds[number] : layout.gateway_bounds[number + 1]]
            first, end = int(rows[0]), int(rows[-1]) + 1
            where = slice(first, end) if end - first == len(rows) else to_device(rows, self.lm.device)
            gateway = self._running[above].gateway
            assert gateway is not None, "an open micro-batch runs before those below it"
            reads.append(GatewayRead(gateway, where, len(rows)))
            if self._running[above].sees_trained_image:
                carried = EVERYTHING
        context = TreeContext(
            run.mask,
            self.impl,
            tuple(reads),
            writes=run.gateway if leaves_gateway else None,
            injects=run.gateway if torch.is_grad_enabled() else None,
            rows=run.rows,
            exchange=run.exchange,
            routes=run.routes,
            carried=carried,
        )
        hidden, router_logits = run_decoder(
            self.lm, layout.token_ids, layout.depth, context, with_router_logits=self.reads_routers, inside=run.inside
        )
        positions = layout.positions
        if run.part is not None:
            own = slice(run.part.num_own)
            positions, hidden, router_logits = (
                positions[own],
                hidden[own],
                tuple(router_logit[own] for router_logit in router_logits),
            )
        return MicroBatchOutput(index, positions, hidden, router_logits, self.head)

    def head(self) -> AnyHead:
        """The model's head with its present weights; one for all micro-batches where its gradients are collected."""
        if not self._collects:
            return self.lm.head(self.temperature)
        if self._head is None:
            self._head = self.lm.head(self.temperature).collecting()
        return self._head

    @contextmanager
    def _one_head(self) -> Iterator[None]:
        """Inside, all micro-batches have one head, which collects its gradients; at the end they reach `.grad`."""
        self._collects = True
        try:
            yield
            if self._head is not None and self._head.gradients is not None:
                self._head.gradients.join()
        finally:
            self._collects, self._head = False, None

    def loss_of_guests(self, output: MicroBatchOutput) -> Tensor | None:
        """What guests add to the loss of a micro-batch."""
        parts = [part for guest in self.guests if (part := guest.loss(output)) is not None]
        return torch.stack(parts).sum() if parts else None

    def _root(self, output: MicroBatchOutput, loss_of: LossOf) -> Tensor:
        """The tensor that a micro-batch's backward starts from."""
        loss = loss_of(output)
        more = self.loss_of_guests(output) if self.guests else None
        if more is None:  # without a loss of its own an open micro-batch still carries the gradients of its gateway
            return output.hidden if loss is None else loss
        # FSDP2 gathers a layer's parameters when a gradient reaches its output, so there is one, if only of zeros.
        more = more + (output.hidden * 0).sum().to(more.dtype)
        return more if loss is None else loss + more.to(loss.dtype)

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that compute parts of one micro-batch; all of them call this."""
        return add_up(self.guests, tensor)


# -- the loss: losses of tokens, from the log-probs of edges, and their sum ------------------------------------------


class Loss(Protocol):
    """What a step takes the gradients of."""

    def backward(self, walk: Walk) -> None:
        """Adds the gradients, by a training, or by a visit and then a training."""

    def evaluate(self, walk: Walk) -> None:
        """The loss alone, by a visit."""

    def output(self, walk: Walk) -> StepOutput:
        """What the step reports, after its walk."""


class StepLoss:
    """The loss of a separable objective on one forest: a sum over terms of one token each, so one walk is enough.

    terms: of the objective on this forest; None: computed here.

    Raises:
        DataError: no trained token, or a denominator that is not positive.
    """

    def __init__(
        self, forest: Forest, objective: Objective, denominator: float | None, terms: Terms | None = None
    ) -> None:
        self.objective, self.terms = objective, objective.terms(forest) if terms is None else terms
        self.denominator = objective.denominator(forest) if denominator is None else denominator
        if len(self.terms.positions) == 0:
            raise DataError("no trained token in the forest; a step on it would do nothing.")
        if not self.denominator > 0:
            raise DataError(f"the loss would be divided by {self.denominator}; it must be positive.")
        self.score = EdgeScorer(forest, self.terms.positions, self.terms.tokens, objective.outputs)
        self._reported: list[Values] = []

    def backward(self, walk: Walk) -> None:
        walk.train(self.of_micro_batch)

    def evaluate(self, walk: Walk) -> None:
        walk.visit(self.of_micro_batch)

    def of_micro_batch(self, output: MicroBatchOutput) -> Float[Tensor, ""] | None:
        """The part of one micro-batch, a scalar from which a backward starts; None without a trained token."""
        found = self.scored(output)
        return None if found is None else found[0]

    def scored(self, output: MicroBatchOutput) -> tuple[Float[Tensor, ""], Entries] | None:
        """The part of one micro-batch, and the values of its terms, detached; None without a trained token."""
        streams: Values = {}

        def of_part(values: Values, entries: np.ndarray, part: slice) -> Tensor:
            if not streams:
                streams.update(self._streams(values["log_probs"], entries))
            return self._loss(values, {name: stream[part] for name, stream in streams.items()})

        found = self.score.loss(output, of_part)
        if found is None:
            return None
        self._report(found[0], found[1][1], streams)
        return found

    def of_terms(self, values: Values) -> Float[Tensor, ""]:
        """The loss of all terms, a scalar, from their [P] values by name."""
        streams = self._streams(values["log_probs"])
        loss = self._loss(values, streams)
        self._report(loss, {name: value.detach() for name, value in values.items()}, streams)
        return loss

    def _streams(self, like: Tensor, entries: Int[np.ndarray, " E"] | None = None) -> Values:
        streams = {}
        for name, stream in self.terms.streams.items():
            dtype = like.dtype if stream.dtype.kind == "f" else torch.long
            streams[name] = to_device(stream if entries is None else stream[entries], like.device, dtype)
        return streams

    def _loss(self, values: Values, streams: Values) -> Float[Tensor, ""]:
        losses = self.objective.token_losses(values, streams)
        if losses.dim() != 1:  # a mean over some terms, which are those of a micro-batch or of a chunk of it
            raise ConfigError(
                f"{type(self.objective).__name__}.token_losses must return one loss for each term, found "
                f"{described(losses)}."
            )
        return losses.sum() / self.denominator

    @torch.no_grad()
    def _report(self, loss: Tensor, values: Values, streams: Values) -> None:
        metrics = self.objective.token_metrics(values, streams)
        self._reported.append({"": loss.detach()} | {name: value.sum() for name, value in metrics.items()})

    def output(self, walk: Walk, *, is_part: bool = True) -> StepOutput:
        """What the step reports, after its walk; the only wait for a device. is_part: other ranks have other terms."""
        totals: dict[str, float] = {}
        if self._reported:
            names = list(self._reported[0])
            table = torch.stack([torch.stack([part[name] for name in names]) for part in self._reported])
            totals = dict(zip(names, table.double().sum(0).tolist(), strict=True))
        for guest in walk.guests if is_part else ():
            totals = guest.add_up_by_name(totals)
        metrics = {name: total / self.terms.weight for name, total in totals.items() if name}
        return step_output(walk, totals[""], len(np.unique(self.terms.positions)), metrics, self.terms.weight)


def step_output(
    walk: Walk, loss: float, num_trained_tokens: int, metrics: Mapping[str, float] | None = None, weight: float = 0.0
) -> StepOutput:
    """The output of a step or an evaluation. loss: without what guests add. weight: of the metrics."""
    forest = walk.plan.forest
    return StepOutput(
        loss=loss + sum(guest.added_loss() for guest in walk.guests),
        num_trained_tokens=num_trained_tokens,
        num_tree_tokens=forest.num_tokens,
        num_flat_tokens=forest.num_flat_tokens,
        num_computed_tokens=walk.num_computed_tokens,
        num_micro_batches=walk.plan.num_micro_batches,
        metrics=metrics or {},
        weight=weight,
        routing=next((report for guest in walk.guests if (report := guest.report()) is not None), None),
        replay=replay_of(walk.guests) if walk.guests else None,
    )
