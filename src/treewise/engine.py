"""The engine: losses and gradients of a forest, equal to training each trajectory alone.

An objective that is separable takes one walk over the plan. Any other loss takes two: values of all its tokens first,
then the loss, then the walk with the loss's gradients on these values. The second form is one differentiable function,
`scores` (`tree_logprobs`, `tree_values`), whose backward is the walk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.attention import IMPLEMENTATIONS
from treewise.attention.cascade import kernel_takes_groups
from treewise.budget import Budget, gateway_bytes, state_bytes
from treewise.errors import ConfigError, DataError
from treewise.forest import LOGPROB_STREAMS, Forest
from treewise.gathering import Read, gather
from treewise.models import base_model, refuse_dropout, refuse_lengths, refuse_placeholders, take_apart
from treewise.objectives import SFT, Objective
from treewise.pacing import Exchange, Pace
from treewise.planner import Plan, plan
from treewise.probe import probe
from treewise.recurrent import peak_cuts
from treewise.routed import count, gather_routed, with_router_loss
from treewise.routing import Routing, RoutingReport, RoutingRule, check_rule, rule_of
from treewise.scoring import ObjectiveLoss, Scorer, Wanted
from treewise.trajectory import Trajectory
from treewise.walk import Walk

Loss = Callable[[list[torch.Tensor]], torch.Tensor]
Forests = Forest | Sequence[Forest]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step computed.

    loss: the sum of token losses divided by the denominator. metrics: means that the objective reports, over `weight`,
    the sum of the loss weights of its trained tokens; so metrics of several steps are combined by their weights.
    routing: where a loss on routers was added, which `loss` then holds, what they did.
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


class TreeEngine:
    """Trains a transformers causal language model, PEFT-wrapped or not, on forests.

    Parameters:
        model: its attention implementation is replaced by treewise's; forwards without trees go on as before.
        max_tokens: the most tokens with live activations at a time; None computes each forest in one micro-batch,
            `auto` measures at the first step how many fit in the free memory. A step that runs out of memory runs
            again with half as many.
        attention: `auto` (flex on CUDA, cascade on CPU), `reference`, `cascade` or `flex`.
        hold: whether open micro-batches may be kept instead of computed twice (`auto`, `never`, `always`).
        temperature: divides the logits, as the sampler did.
        check: probe the model once before its first step.
        offload: gateways and held graphs wait in host memory.
        reserve_bytes: memory that `max_tokens="auto"` leaves to others (an optimizer's state).
        router_aux_loss: whether steps add the load-balancing loss of a mixture of experts, with the model's factor
            (`router_aux_loss_coef`); None does as its configuration says (`output_router_logits`).
        router_z_coefficient: the factor of a z-loss on router logits, which steps add where it is not 0.

    Raises:
        UnsupportedModelError: the model cannot follow a tree; names the layer or setting.
        ConfigError: an unknown attention implementation, or a budget that is none.
    """

    def __init__(
        self,
        model: nn.Module,
        max_tokens: int | str | None = None,
        attention: str = "auto",
        *,
        hold: str = "auto",
        temperature: float = 1.0,
        check: bool = True,
        offload: bool = False,
        reserve_bytes: int = 0,
        router_aux_loss: bool | None = None,
        router_z_coefficient: float = 0.0,
    ) -> None:
        if attention != "auto" and attention not in IMPLEMENTATIONS:
            raise ConfigError(
                f"attention={attention!r} is unknown; choose 'auto' or one of {', '.join(IMPLEMENTATIONS)}."
            )
        if not temperature > 0:
            raise ConfigError(f"temperature={temperature} must be positive.")
        self.model, self.attention = model, attention
        self.hold, self.temperature = hold, temperature
        self.offload, self.reserve_bytes = offload, reserve_bytes
        self._budget = Budget(max_tokens)
        self.parts = take_apart(model)
        self.routing_rule = rule_of(base_model(model), router_aux_loss, router_z_coefficient)
        self._is_probed = not check
        self._pace: Pace | None = None

    @property
    def max_tokens(self) -> int | None:
        """The budget in force; None while there is none."""
        return self._budget.tokens

    def plan(self, forests: Forests) -> Plan:
        """The plan that `step` would run; measures the budget first where that is left to the engine."""
        whole = forests if isinstance(forests, Forest) else Forest.concatenate(list(forests))
        if not self._budget.is_measured:
            self._measure(whole)
        return plan(whole, self._budget.tokens, hold=self.hold)

    def step(
        self,
        forests: Forests,
        objective: Objective | Loss | None = None,
        *,
        denominator: float | None = None,
    ) -> StepOutput:
        """Forward and backward; gradients are added into `.grad`.

        objective: `SFT()` where not given; or any function from the list of log-probs (see `logprobs`) to a scalar.
        denominator: replaces the objective's own, where a step is spread over several calls or ranks.

        Raises:
            DataError: nothing to train, a stream that the objective misses, or a token id beyond the vocabulary.
            ConfigError: a function that gives no scalar, or one beside a denominator.
            UnsupportedModelError: active dropout, or a model that fails the probe.
        """
        chosen = SFT() if objective is None else objective
        whole = forests if isinstance(forests, Forest) else Forest.concatenate(list(forests))
        out: list[StepOutput] = []
        self._budget.run(self.model, whole.num_tokens, lambda: out.append(self._step(whole, chosen, denominator)))
        return out[-1]

    def _step(self, forest: Forest, objective: Objective | Loss, denominator: float | None) -> StepOutput:
        run = self.plan(forest)
        if not isinstance(objective, Objective):
            return self._step_any_loss(run, objective, denominator)
        losses, routing = ObjectiveLoss(forest, objective, denominator), self._routing(run)
        is_separable = objective.is_separable(forest)
        if not is_separable:
            values, router_loss = _routed_scores(self, run, losses.wanted, routing)
            (losses.share(None, values) + router_loss).backward()
        elif routing is None:
            walk = self._walk(run)
            walk.train(losses.reader(walk, self.temperature))
        else:
            if not run.is_whole:
                count(self._walk(run, routing), routing)
            walk = self._walk(run, routing)
            walk.train(with_router_loss(losses.reader(walk, self.temperature), walk, routing))
        return _output(run, losses, is_separable and routing is None, routing)

    @torch.no_grad()
    def evaluate(
        self,
        forests: Forests,
        objective: Objective | None = None,
        *,
        denominator: float | None = None,
    ) -> StepOutput:
        """The loss and the metrics alone, without gradients."""
        run = self.plan(forests)
        chosen = SFT() if objective is None else objective
        losses, routing = ObjectiveLoss(run.forest, chosen, denominator), self._routing(run)
        if routing is None and chosen.is_separable(run.forest):
            walk = self._walk(run)
            walk.visit(losses.reader(walk, self.temperature))
        else:
            losses.share(None, _routed_scores(self, run, losses.wanted, routing)[0])
        return _output(run, losses, True, routing)

    @torch.no_grad()
    def scored(
        self, trajectories: Sequence[Trajectory], stream: str = "old_logprobs", *, all_tokens: bool = False
    ) -> list[Trajectory]:
        """The trajectories with their log-probs under this model as a stream, by one pass without gradients.

        Before the update, `engine.scored(items)` fills `old_logprobs`. For a reference use an engine of another model
        and `stream="ref_logprobs"`, or this one within PEFT's `with model.disable_adapter():`.

        stream: `old_logprobs`, `ref_logprobs` or `sampler_logprobs`. all_tokens: also tokens that no trajectory trains,
        which are 0 otherwise and cost no projection.

        Raises:
            ConfigError: another stream.
        """
        if stream not in LOGPROB_STREAMS:
            raise ConfigError(f"stream={stream!r} is unknown; choose one of {', '.join(LOGPROB_STREAMS)}.")
        items = list(trajectories)
        run = self.plan(Forest.from_trajectories(items))
        is_needed = None if all_tokens else run.forest.token_weights() > 0
        values_T = tree_values(self, run, ("log_probs",), is_needed)["log_probs"].float().cpu().numpy()
        changes: list[dict[str, Any]] = [{stream: values_T[path]} for path in run.forest.paths]
        return [replace(item, **change) for item, change in zip(items, changes, strict=True)]

    def logprobs(self, forests: Forests) -> list[torch.Tensor]:
        """Log-probs of every trajectory, restored: `result[i][j]` belongs to token `j + 1` of trajectory `i`.

        float32 (float64 for float64 models), on the model's device, differentiable at any budget.
        """
        run = self.plan(forests)
        logprobs_T = tree_logprobs(self, run)
        return _restore(logprobs_T, run.forest)

    def hidden_states(self, forests: Forests) -> list[torch.Tensor]:
        """Final hidden states of every trajectory, restored: `result[i][j]` ([M], the model's dtype) has seen tokens
        0 to `j` of trajectory `i`.

        They come after the decoder's last norm, as a value head or a reward head reads them; differentiable at any
        budget. A token that several trajectories share has one row of memory, and its gradients add up.
        """
        run = self.plan(forests)

        def read_of(walk: Walk) -> Read:
            return lambda number, rows: (walk.positions(number), {"rows": rows})

        rows_TM = gather(lambda: self._walk(run), read_of, ("rows",), run.forest.num_tokens)["rows"]
        index = torch.as_tensor(run.forest.path_index, device=rows_TM.device)
        return list(rows_TM[index].split(run.forest.path_lengths.tolist()))

    def _step_any_loss(self, run: Plan, objective: Loss, denominator: float | None) -> StepOutput:
        if denominator is not None:
            raise ConfigError("a function's loss is taken as it is; denominator= belongs to an objective.")
        routing = self._routing(run)
        values, router_loss = _routed_values(self, run, ("log_probs",), None, routing)
        loss = objective(_restore(values["log_probs"], run.forest))
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise ConfigError("an objective must return a scalar tensor.")
        (loss + router_loss).backward()
        return _output(run, float(loss.detach()), False, routing)

    def _measure(self, forest: Forest) -> None:
        """Chooses the budget of `max_tokens="auto"` for forests like this one."""
        self._check(forest)

        @torch.enable_grad()
        def train(num_tokens: int) -> None:
            chain = Forest.from_trajectories([Trajectory(np.resize(forest.token_ids[:2], num_tokens))])
            walk = self._walk(plan(chain))
            walk.train(ObjectiveLoss(chain, SFT(), None).reader(walk, self.temperature))

        state_size, token_size = state_bytes(self.parts), gateway_bytes(self.parts)

        def gateway_tokens(budget: int) -> int:
            run = plan(forest, budget, hold=self.hold)
            # States of recurrent layers, as many tokens as take their memory.
            return run.peak_gateway_tokens + (peak_cuts(run) * state_size // token_size if state_size else 0)

        self._budget.measure(self.parts, train, gateway_tokens, self.reserve_bytes)

    def _walk(self, run: Plan, routing: Routing | None = None) -> Walk:
        self._check(run.forest)
        walk = Walk(self.parts, run, self._implementation(), self.offload, self._pace)
        walk.wants_router_logits = routing is not None
        return walk

    def _routing(self, run: Plan, rule: RoutingRule | None = None) -> Routing | None:
        rule = self.routing_rule if rule is None else rule
        return None if rule is None else Routing(rule, run.forest.multiplicity)

    def check(self, forest: Forest) -> None:
        """What the first step would find out: whether model and tokens can be trained.

        Raises:
            DataError: a token id beyond the vocabulary.
            UnsupportedModelError: active dropout, or a model that fails the probe.
        """
        self._check(forest)

    def keep_pace(self, exchange: Exchange) -> None:
        """From now on every walk runs in step with those of other ranks, which parameters that are sharded need.

        exchange: hands this rank's text to all ranks and returns everybody's. A rank calls `finish_pace` when its walks
        of a step are done, also if it had none. A step that runs out of memory is not tried again: the other ranks
        would be in its middle.
        """
        chain = plan(Forest.from_trajectories([Trajectory(np.zeros(2, dtype=np.int32))]))

        def empty_rows() -> torch.Tensor:
            return Walk(self.parts, chain, self._implementation()).whole_rows()

        self._pace = Pace(exchange, empty_rows)
        self._budget.recovers = False

    def finish_pace(self) -> None:
        """Keeps the other ranks company until all have done their walks."""
        if self._pace is not None:
            self._pace.finish()

    def _check(self, forest: Forest) -> None:
        refuse_dropout(self.model)
        vocabulary = self.parts.decoder.get_input_embeddings().weight.shape[0]
        largest = int(forest.token_ids.max())
        if largest >= vocabulary:
            position = int(forest.token_ids.argmax())
            raise DataError(
                f"token id {largest} at tree position {position} (depth {forest.depth[position]}) is beyond the "
                f"model's {vocabulary} embeddings; was the data tokenised for another model?"
            )
        refuse_placeholders(self.parts, forest.token_ids)
        refuse_lengths(self.parts, int(forest.depth.max()) + 1)
        if not self._is_probed:
            probe(self.parts, self._implementation(), forest.token_ids)
            if self.routing_rule is not None and self.routing_rule.aux_coefficient:
                some = torch.as_tensor(forest.token_ids[:12], dtype=torch.long, device=self.parts.device)
                check_rule(self.parts.model, self.routing_rule, some)
            self._is_probed = True

    def _implementation(self) -> str:
        """The attention to use."""
        if self.attention != "auto":
            return self.attention
        device = self.parts.device.type
        if device == "cuda":
            return "flex"
        return "cascade" if device == "cpu" and kernel_takes_groups() else "reference"


def tree_logprobs(engine: TreeEngine, run: Plan) -> torch.Tensor:
    """[T] log-probs of the tree's tokens (0 for first tokens), as one differentiable function at any budget.

    With one micro-batch this is an ordinary graph. With several, the forward runs without a graph, and the backward is
    the walk, which adds parameter gradients into `.grad`; usable inside any loss, more than once in a graph, and under
    autocast.
    """
    return tree_values(engine, run)["log_probs"]


def tree_values(
    engine: TreeEngine, run: Plan, outputs: tuple[str, ...] = ("log_probs",), is_needed: np.ndarray | None = None
) -> dict[str, torch.Tensor]:
    """[T] values of the tree's tokens by name (see `logprobs.edge_values`), differentiable as `tree_logprobs` is.

    is_needed: [T] bool; others, and first tokens, are 0 and cost no projection.
    """
    return _routed_values(engine, run, outputs, is_needed, None)[0]


def tree_values_and_router_loss(
    engine: TreeEngine,
    run: Plan,
    outputs: tuple[str, ...] = ("log_probs",),
    is_needed: np.ndarray | None = None,
    rule: RoutingRule | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What `tree_values` gives, and the loss on the model's routers, a scalar that is differentiable as they are.

    Both come from the same walks. rule: the factors of both router losses; the engine's own where not given.

    Raises:
        ConfigError: no rule, here or in the engine.
    """
    routing = engine._routing(run, rule)
    if routing is None:
        raise ConfigError("no loss on routers is asked for; give a rule, or router_aux_loss=True to the engine.")
    return _routed_values(engine, run, outputs, is_needed, routing)


def _routed_values(
    engine: TreeEngine, run: Plan, outputs: tuple[str, ...], is_needed: np.ndarray | None, routing: Routing | None
) -> tuple[dict[str, torch.Tensor], Any]:
    """[T] values by name, and the router losses (0 without)."""
    wanted = Wanted.every_token(run.forest, outputs)
    if is_needed is not None:
        wanted = Wanted(wanted.positions[is_needed[wanted.positions]], None, outputs)
    values, router_loss = _routed_scores(engine, run, wanted, routing)
    index = torch.as_tensor(wanted.positions, device=engine.parts.device)
    scattered = {
        name: torch.zeros(run.forest.num_tokens, dtype=value.dtype, device=value.device).index_copy(0, index, value)
        for name, value in values.items()
    }
    return scattered, router_loss


def scores(engine: TreeEngine, run: Plan, wanted: Wanted) -> dict[str, torch.Tensor]:
    """[P] values of the wanted tokens by name, in their order, differentiable as `tree_logprobs` is."""
    return _routed_scores(engine, run, wanted, None)[0]


def _routed_scores(
    engine: TreeEngine, run: Plan, wanted: Wanted, routing: Routing | None
) -> tuple[dict[str, torch.Tensor], Any]:
    def read_of(walk: Walk) -> Read:
        return Scorer(walk, wanted, engine.temperature)

    def new_walk() -> Walk:
        return engine._walk(run, routing)

    length = len(wanted.positions)
    if routing is None:
        return gather(new_walk, read_of, wanted.outputs, length), 0.0
    return gather_routed(new_walk, read_of, wanted.outputs, length, routing)


def _restore(logprobs_T: torch.Tensor, forest: Forest) -> list[torch.Tensor]:
    """Per-trajectory log-probs. The transpose of this gather is gradient restoration."""
    index = torch.as_tensor(forest.path_index, device=logprobs_T.device)
    flat_F = logprobs_T[index]
    return [part[1:] for part in flat_F.split(forest.path_lengths.tolist())]


def _output(
    run: Plan, losses: ObjectiveLoss | float, is_single_walk: bool = False, routing: Routing | None = None
) -> StepOutput:
    """losses: of an objective, or the value of any other loss, which is a function of all log-probs."""
    forest = run.forest
    if isinstance(losses, ObjectiveLoss):
        (loss, metrics), weight, num_trained = losses.totals(), losses.terms.weight, losses.num_trained_tokens
    else:
        loss, metrics, weight = losses, {}, 0.0
        num_trained = forest.num_flat_tokens - forest.num_trajectories
    if routing is not None:
        loss += float(routing.total())
    first_walk = 0 if run.is_whole or is_single_walk else forest.num_tokens
    return StepOutput(
        loss=loss,
        num_trained_tokens=num_trained,
        num_tree_tokens=forest.num_tokens,
        num_flat_tokens=forest.num_flat_tokens,
        num_computed_tokens=run.num_computed_tokens + first_walk,
        num_micro_batches=run.num_micro_batches,
        metrics=metrics,
        weight=weight,
        routing=None if routing is None else routing.report(),
    )
