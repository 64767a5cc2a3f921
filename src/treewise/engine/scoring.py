"""From the output of a micro-batch to log-probs of its edges, and to its part of the loss of a step.

Letters: P scored tokens of a forest, E edges or entries of a micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from treewise.distributed.mesh import ContextGroup
from treewise.engine.differentiable import Entries, Reader, Values, backward_through, restore
from treewise.engine.walk import LossOf, MicroBatchOutput, Walk
from treewise.errors import ConfigError, DataError, num
from treewise.nn.device import to_device
from treewise.nn.lm_head import edge_values
from treewise.nn.router_loss import RouterLoss, RoutingReport
from treewise.objectives import Objective
from treewise.objectives.protocol import Terms
from treewise.objectives.registry import described
from treewise.planning.layout import edges_of
from treewise.planning.planner import Plan
from treewise.shapes import Bool, Float, Int
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import concatenated_ranges

LossFunction = Callable[[list[torch.Tensor]], torch.Tensor]

# -- values of tokens -------------------------------------------------------------------------------------------------


class EdgeScorer:
    """Scores the tokens that each micro-batch predicts. Called on its output; None where it predicts none of them.

    positions: [P] int64 tree positions of the scored tokens, ascending, none of them a first token; each is predicted
    from the path to its parent. tokens: [P] token ids that are scored there; None: the tree's own, and then each
    position is projected once however often it is listed. outputs: names out of `lm_head.OUTPUTS`.
    """

    def __init__(
        self,
        forest: Forest,
        positions: Int[np.ndarray, " P"],
        tokens: Int[np.ndarray, " P"] | None = None,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        self.forest, self.positions, self.tokens, self.outputs = forest, positions, tokens, outputs
        self._is_needed = np.zeros(forest.num_tokens, dtype=bool)
        self._is_needed[positions] = True

    def __call__(self, output: MicroBatchOutput) -> Entries | None:
        """[E] indices of scored tokens, and their [E] values by name."""
        edges = edges_of(self.forest, output.positions, self._is_needed)
        if len(edges.target) == 0:
            return None
        first = np.searchsorted(self.positions, edges.target, side="left")
        count = np.searchsorted(self.positions, edges.target, side="right") - first
        edge, entry = np.repeat(np.arange(len(edges.target)), count), concatenated_ranges(first, count)
        device, head = output.hidden.device, output.head()
        if self.tokens is not None:
            tokens = to_device(self.tokens[entry], device, torch.long)
            return entry, edge_values(output.hidden, head, edges.source[edge], tokens, self.outputs)
        tokens = to_device(self.forest.token_ids[edges.target], device, torch.long)
        values = edge_values(output.hidden, head, edges.source, tokens, self.outputs)
        if len(entry) != len(edges.target):
            index = to_device(edge, device)
            values = {name: value[index] for name, value in values.items()}
        return entry, values

    @property
    def reader(self) -> Reader:
        """Reads the [P] values of scored tokens, in their order."""
        return Reader(self, self.outputs, len(self.positions))


def token_reader(
    forest: Forest, is_needed: Bool[np.ndarray, " T"] | None = None, outputs: tuple[str, ...] = ("log_probs",)
) -> Reader:
    """Reads [T] values of the tree's own tokens, by tree position.

    is_needed: [T] bool; other tokens, and first tokens, are 0 and cost no projection. outputs: names out of
    `lm_head.OUTPUTS`.
    """
    has_parent = forest.parent >= 0
    positions = np.flatnonzero(has_parent if is_needed is None else has_parent & is_needed)
    score = EdgeScorer(forest, positions, outputs=outputs)

    def read(output: MicroBatchOutput) -> Entries | None:
        entries = score(output)
        return None if entries is None else (positions[entries[0]], entries[1])

    return Reader(read, outputs, forest.num_tokens)


def logprob_reader(forest: Forest, *, trained_only: bool) -> Reader:
    """Reads [T] log-probs by tree position, 0 for first tokens; `trained_only`: for all that no trajectory trains."""
    return token_reader(forest, forest.token_weights() > 0 if trained_only else None)


def restored_logprobs(values: Values, forest: Forest, *, trained_only: bool) -> list[torch.Tensor]:
    """[length - 1] log-probs of each trajectory, or those of its trained tokens, from those of the tree's tokens."""
    if trained_only:
        return restore(values["log_probs"], forest, forest.flat_stream("loss_weights") != 0)
    return [logprobs[1:] for logprobs in restore(values["log_probs"], forest)]


# -- the loss of a step -----------------------------------------------------------------------------------------------


class StepLoss:
    """The loss of an objective on one forest: which tokens to score for it, its parts, and what a step reports.

    terms: of the objective on this forest; None: computed here.

    Raises:
        DataError: no trained token, or a denominator that is not positive.
    """

    def __init__(
        self, forest: Forest, objective: Objective, denominator: float | None, terms: Terms | None = None
    ) -> None:
        self.objective = objective
        self.terms = objective.terms(forest) if terms is None else terms
        self.denominator = objective.denominator(forest) if denominator is None else denominator
        if len(self.terms.positions) == 0:
            raise DataError("no trained token in the forest; a step on it would do nothing.")
        if not self.denominator > 0:
            raise DataError(f"the loss would be divided by {self.denominator}; it must be positive.")
        self.reader = EdgeScorer(forest, self.terms.positions, self.terms.tokens, objective.outputs).reader
        self.num_trained_tokens = len(np.unique(self.terms.positions))
        self._reported: list[Values] = []

    def of_micro_batch(self, output: MicroBatchOutput) -> Float[Tensor, ""] | None:
        """The part of one micro-batch, a scalar, for separable objectives; None without a trained token."""
        entries = self.reader.read(output)
        return None if entries is None else self.of_terms(entries[1], entries[0])

    def of_terms(self, values: Values, entries: Int[np.ndarray, " E"] | None = None) -> Float[Tensor, ""]:
        """The loss of some terms ([E] int64 `entries`), or of all, a scalar, from their [E] values by name."""
        like = values["log_probs"]
        streams = {}
        for name, stream in self.terms.streams.items():
            dtype = like.dtype if stream.dtype.kind == "f" else torch.long
            streams[name] = to_device(stream if entries is None else stream[entries], like.device, dtype)
        loss = self.objective.token_losses(values, streams).sum() / self.denominator
        with torch.no_grad():
            constants = {name: value.detach() for name, value in values.items()}
            metrics = self.objective.token_metrics(constants, streams)
        self._reported.append({"": loss.detach()} | {name: value.sum() for name, value in metrics.items()})
        return loss

    def add_up(self, ranks: ContextGroup) -> None:
        """Replaces what this rank's parts report by the sum over the ranks that compute the others; all call this."""
        own: dict[str, float] = {}
        for part in self._reported:
            for name, value in part.items():
                own[name] = own.get(name, 0.0) + float(value)
        wide = torch.float64
        self._reported = [{name: torch.tensor(each, dtype=wide) for name, each in ranks.add_up_by_name(own).items()}]

    def totals(self) -> tuple[float, dict[str, float]]:
        """The loss and the metrics over all parts; the only host synchronisation of a step."""
        names = list(self._reported[0])
        table = torch.stack([torch.stack([part[name] for name in names]) for part in self._reported])
        loss, *sums = table.double().sum(0).tolist()
        return loss, {name: total / self.terms.weight for name, total in zip(names[1:], sums, strict=True)}


def with_router_loss(loss_of: LossOf, router_loss: RouterLoss | None) -> LossOf:
    """A micro-batch's loss and its part of the router losses, for one walk."""
    if router_loss is None:
        return loss_of

    def both(output: MicroBatchOutput) -> torch.Tensor:
        loss, part = loss_of(output), router_loss.part(output.router_logits, output.positions)
        return part if loss is None else loss + part.to(loss.dtype)

    return both


def router_loss_reader(router_loss: RouterLoss, plan: Plan) -> Reader:
    """Reads the router losses, one entry for each micro-batch; `router_loss_of` gives their sum."""

    def read(output: MicroBatchOutput) -> Entries:
        part = router_loss.part(output.router_logits, output.positions)
        return np.array([output.index]), {"router_loss": part[None]}

    return Reader(read, ("router_loss",), plan.num_micro_batches, reads_routers=True)


def router_loss_of(router_loss: RouterLoss, values: Values) -> Float[Tensor, ""]:
    """The router losses of a forest, a differentiable scalar, from the values of `router_loss_reader`."""
    parts = values["router_loss"].sum()
    # The first walk counts, so the parts that it gave are incomplete; the backward's walk gives the right gradients.
    return router_loss.total().to(parts) + (parts - parts.detach())


def backward_with_routers(
    new_walk: Callable[[], Walk],
    plan: Plan,
    reader: Reader,
    router_loss: RouterLoss | None,
    loss_of: Callable[[Values], torch.Tensor],
) -> Float[Tensor, ""]:
    """Backward of a loss on a reader's values plus the router losses; returns the loss without these, detached."""
    losses: list[torch.Tensor] = []

    def total(values: list[Values]) -> torch.Tensor:
        losses.append(loss_of(values[0]))
        return losses[0] if router_loss is None else losses[0] + router_loss_of(router_loss, values[1])

    readers = [reader] if router_loss is None else [reader, router_loss_reader(router_loss, plan)]
    backward_through(new_walk, readers, total)
    return losses[0].detach()


def backward_of_function(
    new_walk: Callable[[], Walk],
    plan: Plan,
    function: LossFunction,
    router_loss: RouterLoss | None,
    *,
    trained_only: bool,
) -> Float[Tensor, ""]:
    """The same of a function of all trajectories' log-probs."""

    def loss_of(values: Values) -> torch.Tensor:
        loss = function(restored_logprobs(values, plan.forest, trained_only=trained_only))
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise ConfigError(f"an objective must return a scalar tensor, found {described(loss)}.")
        if not loss.requires_grad:
            raise ConfigError("the loss that the function returned has no gradient; compute it from the log-probs.")
        return loss

    reader = logprob_reader(plan.forest, trained_only=trained_only)
    return backward_with_routers(new_walk, plan, reader, router_loss, loss_of)


# -- what a step reports ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step computed.

    loss: the sum of token losses divided by the denominator. metrics: means that the objective reports, over `weight`,
    the sum of the loss weights of its trained tokens; so metrics of several steps are combined by their weights.
    num_computed_tokens: forwards of tokens, recomputed ones included. routing: statistics of the routers, where `loss`
    holds a router loss.
    """

    loss: float
    num_trained_tokens: int
    num_tree_tokens: int
    num_flat_tokens: int
    num_computed_tokens: int
    num_micro_batches: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    weight: float = 0.0
    routing: RoutingReport | None = None

    def __repr__(self) -> str:
        sizes = ", ".join(
            (
                num(self.num_trained_tokens, "trained token"),
                num(self.num_tree_tokens, "tree token"),
                num(self.num_flat_tokens, "flat token"),
                num(self.num_micro_batches, "micro-batch", "micro-batches"),
            )
        )
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        return f"StepOutput(loss {self.loss:.6g}, {sizes}{metrics})"


def step_output(
    plan: Plan, loss: StepLoss | float, router_loss: RouterLoss | None, *, has_first_walk: bool
) -> StepOutput:
    """The output of a step or an evaluation.

    loss: of an objective, or the value of a function of all log-probs. has_first_walk: whether a plan of several
    micro-batches was walked once before.
    """
    forest = plan.forest
    if isinstance(loss, StepLoss):
        (value, metrics), weight, num_trained = loss.totals(), loss.terms.weight, loss.num_trained_tokens
    else:
        value, metrics, weight = loss, {}, 0.0
        num_trained = forest.num_flat_tokens - forest.num_trajectories
    return StepOutput(
        loss=value if router_loss is None else value + float(router_loss.total()),
        num_trained_tokens=num_trained,
        num_tree_tokens=forest.num_tokens,
        num_flat_tokens=forest.num_flat_tokens,
        num_computed_tokens=plan.num_computed_tokens + forest.num_tokens * (has_first_walk and not plan.is_whole),
        num_micro_batches=plan.num_micro_batches,
        metrics=metrics,
        weight=weight,
        routing=None if router_loss is None else router_loss.report(),
    )
