"""The engine: losses and gradients of a forest, equal to training each trajectory alone.

A separable objective takes one walk over the plan. Any other loss takes two: values of all its tokens first, then the
loss, then the walk with the loss's gradients on these values (see `differentiable`).
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treewise.distributed.context import ContextGroup
from treewise.distributed.mesh import Mesh, check_same_plan, mesh_of
from treewise.engine.budget import AUTO, Budget, gateway_token_bytes, state_bytes
from treewise.engine.context_walk import ContextWalk
from treewise.engine.differentiable import Reader, Values, backward_through, hidden_reader, restore, tree_values
from treewise.engine.lockstep import Exchange, Lockstep
from treewise.engine.prepared import PlanSettings, PreparedForest, as_prepared
from treewise.engine.probed_rows import text_ids
from treewise.engine.scoring import (
    StepLoss,
    StepOutput,
    router_loss_of,
    router_loss_reader,
    step_output,
    token_reader,
    with_router_loss,
)
from treewise.engine.step_checks import StepChecks
from treewise.engine.vision import ForestVision, PixelsOf, cached_by_digest, processed_by
from treewise.engine.walk import Walk
from treewise.errors import ConfigError, UnsupportedModelError, check_choice
from treewise.nn.attention import choose
from treewise.nn.flops import FlopModel
from treewise.nn.gradients import hooks_run_once, refuse_hooks
from treewise.nn.model import base_model, is_current, split_model
from treewise.nn.model_checks import refuse_candidates
from treewise.nn.model_flops import flop_model
from treewise.nn.recurrent import peak_cuts
from treewise.nn.router_loss import RouterCounts, RouterLoss, router_loss_rule
from treewise.objectives import SFT, Objective
from treewise.objectives.protocol import Terms
from treewise.objectives.registry import checked_objective, described
from treewise.planning.planner import Plan
from treewise.planning.planner import plan as make_plan
from treewise.shapes import Float
from treewise.tree.forest import LOGPROB_STREAMS, Forest, one_forest
from treewise.tree.trajectory import Trajectory

LossFunction = Callable[[list[torch.Tensor]], torch.Tensor]
# A forest, a trajectory, a tree of a data set, or several of these; a list of trajectories is merged (`one_forest`).
Forests = Any


class TreeEngine:
    """Trains a transformers causal language model, PEFT-wrapped or not, on forests.

    Parameters:
        model: its attention implementation is replaced by treewise's; forwards without trees are computed as before.
            Layers may be compiled in place (`layer.compile(dynamic=True)` on each); of `torch.compile(model)` the model
            inside is run.
        max_tokens: the most tokens that hold activations at a time; None computes each forest in one micro-batch,
            `auto` measures at the first step how many fit into the free memory. A step that runs out of memory
            runs again with half as many.
        attention: `auto` (flex on CUDA, cascade on CPU), `reference`, `cascade`, `flex`, `flash`.
        hold: whether open micro-batches keep their activations instead of being recomputed (`auto`, `never`, `always`).
        temperature: divides the logits, as the sampler did.
        check: whether to probe the model before its first step.
        offload: gateways and the activations of held micro-batches wait in host memory.
        reserve_bytes: memory that `max_tokens="auto"` leaves free, for an optimizer's state.
        router_aux_loss: whether steps add the load-balancing loss of a mixture of experts, with the model's factor
            (`router_aux_loss_coef`); None: as its configuration says (`output_router_logits`).
        router_z_coefficient: the factor of a z-loss on router logits; 0: none.
        processor: the model's processor (`transformers.AutoProcessor`), for trajectories with images.
        context: the ranks that compute each batch together, a part of the tokens of every micro-batch each
            (`treewise.distributed.context.context_group`). Gradients are then this rank's part of a sum over them.

    Raises:
        UnsupportedModelError: the model cannot follow a tree; names the layer or setting.
        ConfigError: an unknown attention implementation, or an invalid `max_tokens` or `temperature`.
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
        processor: object = None,
        context: ContextGroup | None = None,
    ) -> None:
        if not temperature > 0:
            raise ConfigError(f"temperature={temperature} must be positive.")
        self.model, self.attention = model, attention
        self.hold, self.temperature = hold, temperature
        self.offload, self.reserve_bytes, self.processor = offload, reserve_bytes, processor
        self.budget = Budget(max_tokens)
        self.lm = split_model(model)
        choose(attention, self.lm.device.type)  # raises for an unknown name
        self._mesh = mesh_of(model)
        self._context = None if context is None else ContextWalk.of(self.lm, context)
        if self._context is not None and self._mesh is not None:
            raise ConfigError(
                f"context_size={self._context.ranks.size} is not implemented together with {self._mesh.sizes}: leave "
                "context= out and lower max_tokens, or load the model whole."
            )
        self._batch_group: tuple[Any, str] | None = None  # of the ranks that compute a batch together
        if self._mesh is not None and self._mesh.tensor.size() > 1:
            self._batch_group = self._mesh.tensor.get_group(), "tp_size"
        elif context is not None:
            self._batch_group = context.group, "context_size"
        if self._batch_group is not None:
            self._require_fixed_budget()
        if self._mesh is not None and self._mesh.needs_lockstep:
            self._require_no_held_passes(self._mesh)
        self.router_loss_rule = router_loss_rule(
            base_model(model), wants_aux=router_aux_loss, z_coefficient=router_z_coefficient
        )
        self._checks = StepChecks(model, has_probes=check)
        self._lockstep: Lockstep | None = None
        self._flops: FlopModel | None = None  # for images
        self._latest_pixels: tuple[weakref.ref[Forest], PixelsOf] | None = None

    def __repr__(self) -> str:
        return f"TreeEngine({type(self.model).__name__}, max_tokens={self.max_tokens}, attention={self.attention!r})"

    @property
    def max_tokens(self) -> int | None:
        """The present budget in tokens; None if there is none, or before `auto` is measured."""
        return self.budget.tokens

    @property
    def implementation(self) -> str:
        """The attention implementation that runs on the model's device."""
        return choose(self.attention, self.lm.device.type)

    def plan(self, forests: Forests) -> Plan:
        """The plan that `step` would run; measures the budget first if it is `auto`."""
        ready = as_prepared(forests)
        if not self.budget.is_measured:
            self._measure(ready.joined)
        settings = self._plan_settings(ready.joined)
        plan = settings.plan(ready.joined) if ready.plan is None or ready.settings != settings else ready.plan
        if self._batch_group is not None:
            check_same_plan(self._batch_group[0], plan, self._batch_group[1])
        return plan

    def prepare(self, forests: Forests, objective: Objective | None = None) -> PreparedForest:
        """What `step` computes on the host before the model runs, for a `step` (or `count_experts`) on the result.

        May run in a thread while another step runs: it draws no random number and touches neither device nor model.
        Planned is what can be: not before `auto` is measured, and not images before a first step read the model.

        Raises:
            DataError: a stream that the objective needs is missing.
            PlanError: see `treewise.plan`.
        """
        forest = one_forest(forests)
        is_known = self.budget.is_measured and (self._flops is not None or not len(forest.images))
        settings = self._plan_settings(forest) if is_known else None
        plan = None if settings is None else settings.plan(forest)
        return PreparedForest(forest, settings, plan, objective, None if objective is None else objective.terms(forest))

    def _plan_settings(self, forest: Forest) -> PlanSettings:
        costs = self._costs if len(forest.images) else None
        return PlanSettings(self.budget.tokens, self.budget.setting == AUTO, self.hold, costs)

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(
        self,
        forests: Forests,
        objective: Objective | LossFunction | None = None,
        *,
        denominator: float | None = None,
        router_counts: RouterCounts | None = None,
        trained_only: bool = False,
    ) -> StepOutput:
        """Forward and backward; gradients are added into `.grad`. Hooks on parameters' gradients run once, in the end.

        forests: a forest, trajectories, items of a data set (what `TreeTrainer` takes), or several of these; or what
        `prepare` returned.
        objective: `SFT()` if None; or any function from the list of log-probs (see `logprobs`) to a scalar.
        trained_only: such a function gets the log-probs of trained tokens alone.
        denominator: replaces the objective's own, if a step is spread over several calls or ranks. router_counts: the
        sum of `count_experts` over these calls and ranks; without it each call balances its own trees.

        Raises:
            DataError: nothing to train, a stream that the objective needs is missing, or a token id beyond the
                vocabulary.
            ConfigError: the loss function returns no scalar; `denominator=` is given with a loss function; gradients
                are disabled; a hook on accumulated gradients, where several ranks compute them.
            UnsupportedModelError: active dropout, or a model that fails the probe.
        """
        self._require_gradients()
        loss: Objective | LossFunction = checked_objective(objective)
        if trained_only and isinstance(loss, Objective):
            raise ConfigError("trained_only= belongs to a loss function; objectives see trained tokens alone.")
        ready = as_prepared(forests)

        def run() -> StepOutput:
            plan = self.plan(ready)
            if isinstance(loss, Objective):
                terms = ready.terms if loss is ready.objective else None
                return self._step_objective(plan, loss, denominator, router_counts, terms)
            return self._step_function(plan, loss, denominator, router_counts, trained_only)

        if self._lockstep is not None or self._mesh is not None or self._context is not None:
            refuse_hooks(self.model, "which is whole only with other ranks' parts. Work on .grad after the step.")
        self.check(ready.joined)  # with the hooks in their places
        with hooks_run_once(self.model):
            return self.budget.run(run, ready.joined.num_tokens, self.model)

    @torch.no_grad()
    def evaluate(
        self,
        forests: Forests,
        objective: Objective | None = None,
        *,
        denominator: float | None = None,
    ) -> StepOutput:
        """The loss and the metrics without gradients; arguments as in `step`."""
        objective = checked_objective(objective)
        plan = self.plan(forests)
        loss, router_loss = self._step_loss(plan.forest, objective, denominator), self.router_loss(plan)
        if objective.is_separable(plan.forest):
            walk = self.new_walk(plan, with_router_logits=router_loss is not None)
            walk.visit(with_router_loss(loss.of_micro_batch, router_loss))
            if self._context is not None:
                loss.add_up(self._context.ranks)
        else:
            counting = [] if router_loss is None else [router_loss_reader(router_loss, plan)]
            loss.of_terms(self.values(plan, [loss.reader, *counting])[0])
        return step_output(plan, loss, router_loss, num_first_walk_tokens=0)

    def count_experts(self, forests: Forests) -> RouterCounts:
        """How often the routers choose each expert on some trees, for a step that is spread over calls or ranks."""
        ready = as_prepared(forests)

        @torch.no_grad()
        def run() -> RouterCounts:
            plan = self.plan(ready)
            router_loss = self.router_loss(plan)
            if router_loss is None:
                raise ConfigError("the engine adds no router loss, so there is nothing to count.")
            self._count_experts(plan, router_loss)
            return router_loss.counts()

        return self.budget.run(run, ready.joined.num_tokens, self.model)

    def _step_objective(
        self,
        plan: Plan,
        objective: Objective,
        denominator: float | None,
        counts: RouterCounts | None,
        terms: Terms | None,
    ) -> StepOutput:
        loss, router_loss = self._step_loss(plan.forest, objective, denominator, terms), self.router_loss(plan, counts)
        needs_first_walk = router_loss is not None and counts is None
        if objective.is_separable(plan.forest):
            walk = self.new_walk(plan, with_router_logits=router_loss is not None)
            if router_loss is not None and counts is None and not walk.counts_at_once:
                self._count_experts(plan, router_loss)
            walk.train(with_router_loss(loss.of_micro_batch, router_loss))
            if self._context is not None:
                loss.add_up(self._context.ranks)
        else:
            needs_first_walk = True
            self._backward_through(plan, loss.reader, router_loss, loss.of_terms)
        num_first_walk_tokens = plan.forest.num_tokens if needs_first_walk and not plan.is_whole else 0
        return step_output(plan, loss, router_loss, num_first_walk_tokens=num_first_walk_tokens)

    def _step_function(
        self,
        plan: Plan,
        function: LossFunction,
        denominator: float | None,
        counts: RouterCounts | None,
        trained_only: bool,
    ) -> StepOutput:
        if denominator is not None:
            raise ConfigError("denominator= belongs to an objective; the loss of a function is used as it is.")
        router_loss = self.router_loss(plan, counts)

        def loss_of(values: Values) -> torch.Tensor:
            loss = function(_restored_logprobs(values, plan.forest, trained_only))
            if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
                raise ConfigError(f"an objective must return a scalar tensor, found {described(loss)}.")
            if not loss.requires_grad:
                raise ConfigError("the loss that the function returned has no gradient; compute it from the log-probs.")
            return loss

        reader = _logprob_reader(plan.forest, trained_only)
        loss = self._backward_through(plan, reader, router_loss, loss_of)
        num_first_walk_tokens = 0 if plan.is_whole else plan.forest.num_tokens
        return step_output(plan, float(loss), router_loss, num_first_walk_tokens=num_first_walk_tokens)

    # -- values -------------------------------------------------------------------------------------------------------

    def logprobs(self, forests: Forests, *, trained_only: bool = False) -> list[Float[Tensor, " _"]]:
        """Log-probs of every trajectory: `result[i][j]` belongs to token `j + 1` of trajectory `i`.

        trained_only: only those of tokens that the trajectory trains (its loss weight is not 0), in order; prompts cost
        no projection. Without it a loss of yours has to leave out prompts and observations itself.

        float32 (float64 for float64 models), on the model's device, differentiable at any budget.
        """
        plan = self.plan(forests)
        values = self.values(plan, [_logprob_reader(plan.forest, trained_only)])[0]
        return _restored_logprobs(values, plan.forest, trained_only)

    def hidden_states(self, forests: Forests) -> list[Float[Tensor, "_ M"]]:
        """Final hidden states of every trajectory: `result[i][j]` ([M], the model's dtype) depends on its tokens 0..j.

        They are taken after the decoder's last norm, as a value head or a reward head reads them; differentiable at any
        budget. A shared token has one row in memory, to which the gradients of all its trajectories add up.
        """
        plan = self.plan(forests)
        return restore(self.values(plan, [hidden_reader(plan.forest)])[0]["hidden"], plan.forest)

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
        check_choice("stream", stream, LOGPROB_STREAMS)
        items = list(trajectories)
        plan = self.plan(Forest.from_trajectories(items))
        is_needed = None if all_tokens else plan.forest.token_weights() > 0
        values_T = self.values(plan, [token_reader(plan.forest, is_needed)])[0]["log_probs"].float().cpu().numpy()
        changes: list[dict[str, Any]] = [{stream: values_T[path]} for path in plan.forest.paths]
        return [replace(item, **change) for item, change in zip(items, changes, strict=True)]

    def values(self, plan: Plan, readers: Sequence[Reader], pixels_of: PixelsOf | None = None) -> list[Values]:
        """Each reader's values over the plan's forest, by name; differentiable at any budget (see `tree_values`).

        pixels_of: maps an image to its tensors; None: the engine's processor makes them.
        """
        reads_routers, vision = any(reader.reads_routers for reader in readers), self._vision(plan, pixels_of)
        return tree_values(lambda: self.new_walk(plan, with_router_logits=reads_routers, vision=vision), readers)

    def _backward_through(
        self, plan: Plan, reader: Reader, router_loss: RouterLoss | None, loss_of: Callable[[Values], torch.Tensor]
    ) -> torch.Tensor:
        """Backward of a loss on a reader's values plus the router losses; returns the loss without these, detached."""
        losses: list[torch.Tensor] = []

        def total(values: list[Values]) -> torch.Tensor:
            losses.append(loss_of(values[0]))
            return losses[0] if router_loss is None else losses[0] + router_loss_of(router_loss, values[1])

        readers = [reader] if router_loss is None else [reader, router_loss_reader(router_loss, plan)]
        reads_routers, vision = router_loss is not None, self._vision(plan)
        backward_through(lambda: self.new_walk(plan, with_router_logits=reads_routers, vision=vision), readers, total)
        return losses[0].detach()

    # -- walks --------------------------------------------------------------------------------------------------------

    def new_walk(
        self,
        plan: Plan,
        *,
        with_router_logits: bool = False,
        vision: ForestVision | None = None,
        for_images: bool = False,
    ) -> Walk:
        """A walk over a plan, after `check`. vision: the plan's images, where several walks share them. for_images: see
        `Walk`.

        Raises:
            ConfigError: ranks with different batches would have to exchange tokens, and nothing keeps their passes
                together.
        """
        if self._mesh is not None and self._mesh.needs_lockstep and self._lockstep is None:
            raise ConfigError(
                "experts are spread over ranks with different batches (ep_size > tp_size), which have to run the same "
                "passes: call engine.check(forest) with one forest on all ranks, then engine.enable_lockstep(...)."
            )
        self.check(plan.forest)
        return Walk(
            self.lm,
            plan,
            self.implementation,
            temperature=self.temperature,
            offload=self.offload,
            lockstep=self._lockstep,
            with_router_logits=with_router_logits,
            vision=self._vision(plan) if vision is None else vision,
            context=self._context,
            for_images=for_images,
        )

    @property
    def _costs(self) -> FlopModel:
        """The costs of the model, for plans with images."""
        if self._flops is None:
            self._flops = flop_model(self.lm.model)
        return self._flops

    def _vision(self, plan: Plan, pixels_of: PixelsOf | None = None) -> ForestVision | None:
        """The images of a plan's forest, for walks with the present weights; None if it has none."""
        if not len(plan.forest.images):
            return None
        self.refuse_images()
        if pixels_of is None:
            pixels_of = self._own_pixels(plan.forest)
        fits, per_row = self._costs.keeps_images(plan), self._costs.tokens_per_row
        return ForestVision(
            self.lm,
            plan.forest,
            pixels_of,
            is_in_graph=plan.is_whole and fits,
            keeps_graph=fits,
            max_rows=None if plan.max_tokens is None else int(plan.max_tokens / max(per_row, 1.0)),
        )

    def _own_pixels(self, forest: Forest) -> PixelsOf:
        """By the processor, each image once for all walks over a forest; only those of the latest forest are kept."""
        latest = None if self._latest_pixels is None or self._latest_pixels[0]() is not forest else self._latest_pixels
        if latest is None:
            made = cached_by_digest(processed_by(self.processor, "TreeEngine(model, processor=...)"))
            latest = self._latest_pixels = weakref.ref(forest), made
        return latest[1]

    def refuse_images(self) -> None:
        """Raises `UnsupportedModelError` where images cannot be computed by the ranks of this engine."""
        if self._mesh is not None:
            raise UnsupportedModelError("images are not supported yet with tp_size or ep_size; use copies or sharded.")
        if self._context is not None:
            raise UnsupportedModelError(
                "images are not supported with context_size, which divides tokens among ranks, but not a vision tower: "
                "leave it out and give max_tokens a number."
            )

    def check(self, forest: Forest) -> None:
        """Checks whether model and tokens can be trained, as the first step does.

        Raises:
            DataError: a token id beyond the vocabulary.
            UnsupportedModelError: active dropout, or a model that fails the probe. Gradients are probed where they are
                enabled.
        """
        if not is_current(self.lm):
            self.lm = split_model(self.model)
        # Where ranks compute together, a forward of one rank alone would wait for the others for ever. Tensors of
        # images that a trainer gives (`values(pixels_of=)`) come without a processor for a flat row.
        is_alone = self._lockstep is None and self._mesh is None and self._context is None
        processor = self.processor if is_alone else None
        self._checks.check(
            self.lm,
            self.implementation,
            forest,
            self.router_loss_rule,
            processor=processor,
            hold=self.hold,
            offload=self.offload,
            before_probe=None if self._batch_group is None else partial(self.plan, forest),
        )

    def stand_in_for(self, module: nn.Module) -> None:
        """`module.forward` is a function that calls this engine from now on, and no change of the model.

        Whoever replaces it has `check`, which calls the model's own forward, find the one before.
        """
        self._checks.stands_in_for = module

    def enable_lockstep(self, exchange: Exchange) -> None:
        """Runs every later walk in lockstep with the other ranks.

        Required with sharded parameters, whose gathers are collective. A rank calls `drain` when its walks of a step
        are done, also if it had none. A step that runs out of memory is not retried: the other ranks would be in the
        middle of theirs.

        exchange: sends this rank's text to all ranks and returns everybody's.
        """
        chain = make_plan(Forest.from_trajectories([Trajectory(np.zeros(2, dtype=np.int32))]))

        def empty_rows() -> torch.Tensor:
            return Walk(self.lm, chain, self.implementation, lockstep=self._lockstep).whole_output().hidden

        self._lockstep = Lockstep(exchange, empty_rows)
        self.budget.recovers = False

    def drain(self) -> None:
        """Runs empty passes until every rank has finished its walks of this step."""
        if self._lockstep is not None:
            self._lockstep.drain()

    def router_loss(self, plan: Plan, counts: RouterCounts | None = None) -> RouterLoss | None:
        """The router losses of one step on a plan; None if the engine adds none. counts: of the whole step."""
        rule = self.router_loss_rule
        add_up = None if self._context is None else self._context.ranks.add_up
        return None if rule is None else RouterLoss(rule, plan.forest.multiplicity, counts, add_up)

    def _count_experts(self, plan: Plan, router_loss: RouterLoss) -> None:
        """A walk without a graph, which counts the choices of the whole step."""
        walk = self.new_walk(plan, with_router_logits=True)
        walk.visit(lambda output: router_loss.part(output.router_logits, output.positions))
        router_loss.finish_counting()

    def _step_loss(
        self, forest: Forest, objective: Objective, denominator: float | None, terms: Terms | None = None
    ) -> StepLoss:
        loss = StepLoss(forest, objective, denominator, terms)
        if loss.terms.tokens is not None:
            refuse_candidates(self.lm, loss.terms.tokens)
        return loss

    def _measure(self, forest: Forest) -> None:
        """Chooses the budget of `max_tokens="auto"` for forests like this one."""

        @torch.enable_grad()
        def train(num_tokens: int) -> None:
            chain = Forest.from_trajectories([Trajectory(np.resize(text_ids(forest)[:2], num_tokens))])
            walk = self.new_walk(make_plan(chain), for_images=len(forest.images) > 0)
            walk.train(StepLoss(chain, SFT(), None).of_micro_batch)

        self.check(forest)
        state_size, token_size = state_bytes(self.lm), gateway_token_bytes(self.lm)

        def gateway_tokens(budget: int) -> int:
            plan = make_plan(forest, budget, hold=self.hold)
            # States of recurrent layers, counted as the tokens that take as many bytes.
            return plan.peak_gateway_tokens + (peak_cuts(plan) * state_size // token_size if state_size else 0)

        # An image is never cut.
        self.budget.measure(self.lm, train, gateway_tokens, self.reserve_bytes, max(1, forest.images.largest))

    def _require_fixed_budget(self) -> None:
        """Ranks that compute a batch together all need the budget of the others, and none may run a step again."""
        if self.budget.setting == AUTO:
            raise ConfigError(
                "max_tokens='auto' measures the free memory of each rank, and ranks that compute a batch together "
                "(tp_size, context_size) need one budget; give max_tokens a number, or None."
            )
        self.budget.recovers = False

    def _require_no_held_passes(self, mesh: Mesh) -> None:
        """Tokens return to their rank in the backward of the pass that sent them, so both are one turn of all ranks."""
        if self.hold == "always":
            raise ConfigError(
                f"hold='always' cannot be combined with {mesh.sizes}: with ep_size > tp_size ranks would run backwards "
                "of passes that they did not compute together; use auto or never."
            )
        self.hold = "never"

    def _require_gradients(self) -> None:
        if not torch.is_grad_enabled():
            raise ConfigError(
                "step computes gradients, which are disabled here (torch.no_grad or inference_mode); for the loss "
                "alone call evaluate."
            )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigError("no parameter of the model requires a gradient, so a step would do nothing.")


def _logprob_reader(forest: Forest, trained_only: bool) -> Reader:
    return token_reader(forest, forest.token_weights() > 0 if trained_only else None)


def _restored_logprobs(values: Values, forest: Forest, trained_only: bool) -> list[torch.Tensor]:
    """[length - 1] log-probs of each trajectory, or those of its trained tokens, from those of the tree's tokens."""
    logprobs_N = restore(values["log_probs"], forest)
    if not trained_only:
        return [logprobs[1:] for logprobs in logprobs_N]
    is_trained = torch.from_numpy(forest.flat_stream("loss_weights") != 0).to(values["log_probs"].device)
    masks_N = is_trained.split(forest.path_lengths.tolist())
    return [logprobs[mask] for logprobs, mask in zip(logprobs_N, masks_N, strict=True)]
