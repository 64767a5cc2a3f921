"""The engine: losses and gradients of a forest, equal to training each trajectory alone.

An objective that is separable takes one walk over the plan. Any other loss takes two: values of all its tokens first,
then the loss, then the walk with the loss's gradients on these values (see `values`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.engine.budget import Budget, gateway_token_bytes, state_bytes
from treewise.engine.lockstep import Exchange, Pace
from treewise.engine.outputs import StepOutput, output_of
from treewise.engine.probe import probe
from treewise.engine.routed import count, with_router_loss
from treewise.engine.scoring import ObjectiveLoss
from treewise.engine.values import hidden_rows, restore, routed_scores, routed_values, tree_logprobs, tree_values
from treewise.engine.walk import Walk
from treewise.errors import ConfigError
from treewise.nn.attention import choose
from treewise.nn.device import to_device
from treewise.nn.model import (
    base_model,
    is_current,
    refuse_candidates,
    refuse_dropout,
    refuse_lengths,
    refuse_placeholders,
    refuse_tokens,
    take_apart,
)
from treewise.nn.recurrent import peak_cuts
from treewise.nn.router_loss import Routing, RoutingRule, check_rule, rule_of
from treewise.objectives import SFT, Objective
from treewise.planning.planner import Plan, plan
from treewise.tree.forest import LOGPROB_STREAMS, Forest, one_forest
from treewise.tree.trajectory import Trajectory

Loss = Callable[[list[torch.Tensor]], torch.Tensor]
Forests = Forest | Sequence[Forest]


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
        if not temperature > 0:
            raise ConfigError(f"temperature={temperature} must be positive.")
        self.model, self.attention = model, attention
        self.hold, self.temperature = hold, temperature
        self.offload, self.reserve_bytes = offload, reserve_bytes
        self.budget = Budget(max_tokens)
        self.parts = take_apart(model)
        choose(attention, self.parts.device.type)  # an unknown name is an error now
        self.routing_rule = rule_of(base_model(model), router_aux_loss, router_z_coefficient)
        self._is_checked, self._is_probed = check, not check
        self._pace: Pace | None = None

    @property
    def max_tokens(self) -> int | None:
        """The budget in force; None while there is none."""
        return self.budget.tokens

    def plan(self, forests: Forests) -> Plan:
        """The plan that `step` would run; measures the budget first where that is left to the engine."""
        whole = one_forest(forests)
        if not self.budget.is_measured:
            self._measure(whole)
        return plan(whole, self.budget.tokens, hold=self.hold)

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
            ConfigError: a function that gives no scalar, or one beside a denominator; gradients that are switched off.
            UnsupportedModelError: active dropout, or a model that fails the probe.
        """
        self._require_gradients()
        chosen = SFT() if objective is None else objective
        if isinstance(chosen, type) or not (isinstance(chosen, Objective) or callable(chosen)):
            raise ConfigError(f"objective is {_described(chosen)}; give tw.SFT(), another objective, or a function.")
        whole = one_forest(forests)
        out: list[StepOutput] = []
        self.budget.run(self.model, whole.num_tokens, lambda: out.append(self._step(whole, chosen, denominator)))
        return out[-1]

    def _step(self, forest: Forest, objective: Objective | Loss, denominator: float | None) -> StepOutput:
        run = self.plan(forest)
        if not isinstance(objective, Objective):
            return self._step_any_loss(run, objective, denominator)
        losses, routing = self._losses(forest, objective, denominator), self.routing(run)
        is_separable = objective.is_separable(forest)
        if not is_separable:
            values, router_loss = routed_scores(self, run, losses.wanted, routing)
            (losses.share(None, values) + router_loss).backward()
        elif routing is None:
            walk = self.new_walk(run)
            walk.train(losses.reader(walk, self.temperature))
        else:
            if not run.is_whole:
                count(self.new_walk(run, routing), routing)
            walk = self.new_walk(run, routing)
            walk.train(with_router_loss(losses.reader(walk, self.temperature), walk, routing))
        return output_of(run, losses, is_separable and routing is None, routing)

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
        losses, routing = self._losses(run.forest, chosen, denominator), self.routing(run)
        if routing is None and chosen.is_separable(run.forest):
            walk = self.new_walk(run)
            walk.visit(losses.reader(walk, self.temperature))
        else:
            losses.share(None, routed_scores(self, run, losses.wanted, routing)[0])
        return output_of(run, losses, True, routing)

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
        return restore(logprobs_T, run.forest)

    def hidden_states(self, forests: Forests) -> list[torch.Tensor]:
        """Final hidden states of every trajectory, restored: `result[i][j]` ([M], the model's dtype) has seen tokens
        0 to `j` of trajectory `i`.

        They come after the decoder's last norm, as a value head or a reward head reads them; differentiable at any
        budget. A token that several trajectories share has one row of memory, and its gradients add up.
        """
        run = self.plan(forests)

        rows_TM = hidden_rows(self, run)
        index = to_device(run.forest.path_index, rows_TM.device)
        return list(rows_TM[index].split(run.forest.path_lengths.tolist()))

    def _step_any_loss(self, run: Plan, objective: Loss, denominator: float | None) -> StepOutput:
        if denominator is not None:
            raise ConfigError("a function's loss is taken as it is; denominator= belongs to an objective.")
        routing = self.routing(run)
        values, router_loss = routed_values(self, run, ("log_probs",), None, routing)
        loss = objective(restore(values["log_probs"], run.forest))
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise ConfigError(f"an objective must return a scalar tensor, found {_described(loss)}.")
        if not loss.requires_grad:
            raise ConfigError("the loss that the function returned has no gradient; compute it from the log-probs.")
        (loss + router_loss).backward()
        return output_of(run, float(loss.detach()), False, routing)

    def _measure(self, forest: Forest) -> None:
        """Chooses the budget of `max_tokens="auto"` for forests like this one."""
        self._check(forest)

        @torch.enable_grad()
        def train(num_tokens: int) -> None:
            chain = Forest.from_trajectories([Trajectory(np.resize(forest.token_ids[:2], num_tokens))])
            walk = self.new_walk(plan(chain))
            walk.train(ObjectiveLoss(chain, SFT(), None).reader(walk, self.temperature))

        state_size, token_size = state_bytes(self.parts), gateway_token_bytes(self.parts)

        def gateway_tokens(budget: int) -> int:
            run = plan(forest, budget, hold=self.hold)
            # States of recurrent layers, as many tokens as take their memory.
            return run.peak_gateway_tokens + (peak_cuts(run) * state_size // token_size if state_size else 0)

        self.budget.measure(self.parts, train, gateway_tokens, self.reserve_bytes)

    def new_walk(self, run: Plan, routing: Routing | None = None) -> Walk:
        """A walk over a plan; the first one checks model and tokens, see `check`."""
        self._check(run.forest)
        walk = Walk(self.parts, run, self.implementation, self.offload, self._pace)
        walk.wants_router_logits = routing is not None
        return walk

    def routing(self, run: Plan, rule: RoutingRule | None = None) -> Routing | None:
        """What collects the losses on routers over a plan, by the engine's rule or another; None without one."""
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
            return Walk(self.parts, chain, self.implementation).whole_rows()

        self._pace = Pace(exchange, empty_rows)
        self.budget.recovers = False

    def finish_pace(self) -> None:
        """Keeps the other ranks company until all have done their walks."""
        if self._pace is not None:
            self._pace.finish()

    def _require_gradients(self) -> None:
        if not torch.is_grad_enabled():
            raise ConfigError(
                "step computes gradients, which are switched off here (torch.no_grad or inference_mode); for the loss "
                "alone call evaluate."
            )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigError("no parameter of the model requires a gradient, so a step would do nothing.")

    def _losses(self, forest: Forest, objective: Objective, denominator: float | None) -> ObjectiveLoss:
        losses = ObjectiveLoss(forest, objective, denominator)
        if losses.wanted.tokens is not None:
            refuse_candidates(self.parts, losses.wanted.tokens)
        return losses

    def _check(self, forest: Forest) -> None:
        if not is_current(self.parts):
            self.parts, self._is_probed = take_apart(self.model), not self._is_checked
        refuse_dropout(self.model)
        refuse_tokens(self.parts, forest)
        refuse_placeholders(self.parts, forest.token_ids)
        refuse_lengths(self.parts, int(forest.depth.max()) + 1)
        if not self._is_probed:
            probe(self.parts, self.implementation, forest.token_ids)
            if self.routing_rule is not None and self.routing_rule.aux_coefficient:
                some = torch.as_tensor(forest.token_ids[:12], dtype=torch.long, device=self.parts.device)
                check_rule(self.parts.model, self.routing_rule, some)
            self._is_probed = True

    @property
    def implementation(self) -> str:
        """The attention implementation that runs on the model's device."""
        return choose(self.attention, self.parts.device.type)


def _described(value: object) -> str:
    """A value in a message: a tensor by its shape, a class by its name, else its type."""
    if isinstance(value, torch.Tensor):
        return f"one of shape {list(value.shape)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
