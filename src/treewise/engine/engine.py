"""The engine: losses and gradients of a forest, equal to training each trajectory alone.

A separable objective walks over the plan once (`step`). Any other loss walks twice: for the values of all its tokens,
and, after the loss, with the loss's gradients (`values`, loaded for such a loss, or where log-probs or hidden states
are asked for).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedConfig

from treewise.base import features
from treewise.base.shapes import Float
from treewise.distributed import ranks
from treewise.distributed.parts import mesh_of
from treewise.engine.checks import StepChecks, refuse_no_gradients
from treewise.engine.edge_scorer import Values
from treewise.engine.prepared import AUTO, Budget, PlanSettings, PreparedForest, StepOutput
from treewise.engine.step import Loss, StepLoss, Walk, take_step, with_less_memory
from treewise.errors import ConfigError, check_choice
from treewise.nn.attention import choose
from treewise.nn.guest import Guest, MeetsImages, replay_of
from treewise.nn.model import split_model
from treewise.nn.model_checks import refuse_candidates
from treewise.nn.platform.tensors import autocast_dtype
from treewise.nn.platform.versions import warn_of_untested_torch
from treewise.objectives.protocol import Objective
from treewise.objectives.rollouts import step_forest
from treewise.objectives.sft import SFT, checked_objective
from treewise.planning.planner import plan as make_plan
from treewise.planning.plans import Plan
from treewise.tree.forest import LOGPROB_STREAMS, Forest, one_forest
from treewise.tree.trajectory import Trajectory

if TYPE_CHECKING:
    from treewise.distributed.context import ContextGroup
    from treewise.distributed.lockstep.guest import Lockstep
    from treewise.engine.values import LossFunction, Reader
    from treewise.engine.window import Window
    from treewise.nn.router_loss import RouterCounts, RouterLosses, RouterLossRule
    from treewise.nn.vision import EngineImages
    from treewise.nn.vision.forest_images import PixelsOf

# A forest, a trajectory, a tree of a data set, or several of these; a list of trajectories is merged (`one_forest`).
Forests = object


class TreeEngine:
    """Trains a transformers causal language model, PEFT-wrapped or not, on forests.

    Parameters:
        model: its attention implementation is replaced by treewise's; forwards without trees are computed as before.
            Layers may be compiled in place (`layer.compile(dynamic=True)` on each); of `torch.compile(model)` the model
            inside is run.
        max_tokens: how many tokens may hold activations at a time; None computes each forest in one micro-batch,
            `auto` measures at the first step how many fit into the free memory. A step that runs out of memory
            runs again with half as many.
        attention: `auto` (flex on CUDA, but reference in float64; cascade on CPU), `reference`, `cascade`, `flex`,
            `flash`, `cudnn`.
        hold: whether open micro-batches keep their activations instead of being recomputed (`auto`, `never`, `always`).
        temperature: divides the logits, as the sampler did.
        check: whether to probe the model before its first step.
        offload: gateways and the activations of held micro-batches wait in host memory.
        reserve_bytes: memory that `max_tokens="auto"` leaves free, for an optimizer's state.
        router_aux_loss: whether steps add the load-balancing loss of a mixture of experts, with the model's factor
            (`router_aux_loss_coef`); None: as its configuration says (`output_router_logits`).
        router_z_coefficient: the factor of a z-loss on router logits; 0: none.
        router_loss_choices: what the load-balancing loss counts where recorded experts are replayed: `live`, what the
            routers would choose now, or `replayed`, what they are made to choose.
        processor: the model's processor (`transformers.AutoProcessor`), for trajectories with images.
        context: the ranks that compute each batch together, a part of the tokens of every micro-batch each
            (`treewise.distributed.mesh.context_group`). Gradients are then this rank's part of a sum over them.

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
        router_loss_choices: Literal["live", "replayed"] = "live",
        processor: object = None,
        context: "ContextGroup | None" = None,
    ) -> None:
        if not temperature > 0:
            raise ConfigError(f"temperature={temperature} must be positive.")
        self.model, self.attention, self.processor = model, attention, processor
        self.hold, self.temperature = hold, temperature
        self.offload, self.reserve_bytes = offload, reserve_bytes
        self.budget = Budget(max_tokens)
        self.lm = split_model(model)
        choose(attention, self.lm.device.type)  # raises for an unknown name
        self._implementations: dict[Any, str] = {}  # by type of device and dtype
        warn_of_untested_torch()
        self.replay: Any = None
        check_choice("router_loss_choices", router_loss_choices, ("live", "replayed"))
        self.router_loss_rule: RouterLossRule | None = None
        if wants_router_losses(self.lm.base.config, router_aux_loss) or router_z_coefficient:
            rule_of = features.router_loss.router_loss_rule
            self.router_loss_rule = rule_of(
                self.lm.base,
                wants_aux=router_aux_loss,
                z_coefficient=router_z_coefficient,
                choices=router_loss_choices,
            )
        self._checks = StepChecks(model, has_probes=check)
        self._images: EngineImages | None = None
        self.in_window: Window | None = None
        # What joins every walk; and of the ranks that compute a batch together, their group and the setting's name.
        self._mesh = mesh_of(model)
        self._lockstep: Lockstep | None = None
        self._shards: Any = None
        self._context = None if context is None else features.context.ContextWalk(self.lm, context, self._mesh)
        self._host_memory = features.host_memory.HostMemory() if offload else None
        self._batch_group: tuple[distributed.ProcessGroup, str] | None = None
        if self._mesh is not None:
            if self._mesh.tensor.size() > 1:
                self._batch_group = self._mesh.tensor.get_group(), "tp_size"
            if self._mesh.needs_lockstep:
                self._mesh.refuse_held_passes(hold)
                self.hold = "never"
        elif context is not None:
            self._batch_group = context.group, "context_size"
        if self._batch_group is not None:
            self.budget.fix("(tp_size, context_size)")

    def __repr__(self) -> str:
        return f"TreeEngine({type(self.model).__name__}, max_tokens={self.max_tokens}, attention={self.attention!r})"

    @property
    def max_tokens(self) -> int | None:
        """The present budget in tokens; None if there is none, or before `auto` is measured."""
        return self.budget.tokens

    @property
    def implementation(self) -> str:
        """The attention implementation that runs on the model's device, in its dtype."""
        kind = self.lm.device.type
        key = kind, autocast_dtype(kind) or self.lm.decoder.dtype
        if key not in self._implementations:
            self._implementations[key] = choose(self.attention, *key, self.lm.decoder)
        return self._implementations[key]

    @property
    def turn(self) -> tuple[int, int]:
        """Which of the batches that are computed at a time is this rank's, and their number."""
        size = 1 if self._batch_group is None else distributed.get_world_size(self._batch_group[0])
        return ranks.own() // size, ranks.count() // size

    @property
    def computes_alone(self) -> bool:
        """Whether no other rank waits for the passes of this one."""
        return self._lockstep is None and self._mesh is None and self._context is None and self._shards is None

    @property
    def images(self) -> "EngineImages":
        """The images of its forests (`nn.vision.EngineImages`)."""
        if self._images is None:
            divided_by = "mesh" if self._mesh is not None else None if self._context is None else "context"
            self._images = features.images.EngineImages(self.lm.model, self.processor, divided_by)
        return self._images

    def plan(self, forests: Forests) -> Plan:
        """The plan that `step` would run; measures the budget first if it is `auto`."""
        ready = forests if isinstance(forests, PreparedForest) else PreparedForest(one_forest(forests))
        if not self.budget.is_measured:
            forest = ready.joined
            self.check(forest)
            new_walk = partial(self.new_walk, images=[MeetsImages()] if forest.has_images else [])
            features.budget.measure(
                self.budget, self.lm, forest, new_walk, hold=self.hold, reserve_bytes=self.reserve_bytes
            )
        settings = self._plan_settings(ready.joined)
        is_current = ready.plan is not None and ready.settings == settings
        plan = ready.plan if is_current else self._planned(ready.joined, settings)
        assert plan is not None
        if self._batch_group is not None:
            features.same_plan.check_same_plan(self._batch_group[0], plan, self._batch_group[1])
        return plan

    def prepare(self, forests: Forests, objective: Objective | None = None) -> PreparedForest:
        """What `step` computes on the host before the model runs, for a `step` (or `count_experts`) on the result.

        May run in a thread while another step runs: it draws no random number and touches neither device nor model.
        Planned is what can be: not before `auto` is measured, and not images before a first step read the model.

        Raises:
            DataError: a stream that the objective needs is missing.
            PlanError: see `treewise.plan`.
        """
        forest = step_forest(forests, objective)
        is_known = self.budget.is_measured and (not forest.has_images or self.images.can_plan(forest))
        settings = self._plan_settings(forest) if is_known else None
        plan = None if settings is None else self._planned(forest, settings)
        return PreparedForest(forest, settings, plan, objective, None if objective is None else objective.terms(forest))

    @staticmethod
    def _planned(forest: Forest, settings: PlanSettings) -> Plan:
        """The plan of a forest; depends on the forest and these settings alone."""
        most = settings.max_tokens
        if most is None or forest.num_tokens <= most:
            return Plan.whole(forest, most)
        if settings.costs is not None:
            return settings.costs.plan(forest, most, hold=settings.hold)
        if settings.is_measured or settings.least_tokens:
            fastest: Plan = features.fastest.fastest_plan(
                forest, most, hold=settings.hold, least_tokens=settings.least_tokens
            )
            return fastest
        return make_plan(forest, most, hold=settings.hold)

    def _plan_settings(self, forest: Forest) -> PlanSettings:
        most, is_measured = self.budget.tokens, self.budget.setting == AUTO
        if forest.has_images:
            return PlanSettings(most, is_measured, self.hold, self.images.costs_of(forest))
        if most is None or forest.num_tokens <= most or self.lm.device.type == "cpu":
            return PlanSettings(most, is_measured, self.hold)
        least = features.launching.least_tokens(self.lm, forest)
        return PlanSettings(most, is_measured, self.hold, least_tokens=least)

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(
        self,
        forests: Forests,
        objective: "Objective | LossFunction | None" = None,
        *,
        denominator: float | None = None,
        router_counts: "RouterCounts | None" = None,
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
        refuse_no_gradients(self.model)
        loss: Objective | LossFunction = SFT() if objective is None else objective
        if not isinstance(loss, Objective) or isinstance(loss, type):
            loss = checked_objective(loss)
        if isinstance(loss, Objective) and trained_only:
            raise ConfigError("trained_only= belongs to a loss function; objectives see trained tokens alone.")
        ready = self._ready(forests, loss)
        if not self.computes_alone:
            features.gradient_hooks.refuse_hooks(
                self.model, "which is whole only with other ranks' parts. Work on .grad after the step."
            )
        parameters = self._checked(ready.joined)  # with the hooks in their places
        begin = partial(self._begun, ready, loss, denominator, router_counts=router_counts, trained_only=trained_only)
        return take_step(begin, self.model, parameters, self.budget, ready.joined.num_tokens)

    @staticmethod
    def _ready(forests: Forests, loss: "Objective | LossFunction") -> PreparedForest:
        """The forest of a step with a loss; with what was prepared for it, if it is still so."""
        if not isinstance(forests, PreparedForest):
            return PreparedForest(step_forest(forests, loss))
        forest = forests.joined if forests.objective is loss else step_forest(forests.joined, loss)
        return forests if forest is forests.joined else PreparedForest(forest)

    def _begun(
        self,
        ready: PreparedForest,
        loss: "Objective | LossFunction",
        denominator: float | None,
        *,
        router_counts: "RouterCounts | None" = None,
        trained_only: bool = False,
    ) -> tuple[Walk, Loss]:
        """The walk over a forest's plan under the present budget, and the loss on it."""
        plan = self.plan(ready)
        own = self._new_loss(ready, loss, denominator, trained_only=trained_only)
        guests = self._guests(plan)
        if self.router_loss_rule is not None:
            guests.append(self._router_losses(self.router_loss_rule, plan, router_counts))
        return self._walk(plan, guests), own

    def _walk(self, plan: Plan, guests: Sequence[Guest], *, reads_routers: bool = False) -> Walk:
        """A walk over a plan; within a window one over the same trees, of which the window computes what is new."""
        reads = reads_routers or any(guest.reads_routers for guest in guests)
        own = self.lm, self.implementation, guests
        window = self.in_window
        found = None if window is None else window.found(plan.forest, with_routers=reads)
        if window is not None and found is not None:
            answered: Walk = features.window.WindowWalk(
                window, found, plan.forest, *own, temperature=self.temperature, reads_routers=reads
            )
            return answered
        return Walk(self.lm, plan, self.implementation, guests, temperature=self.temperature, reads_routers=reads)

    def _new_loss(
        self, ready: PreparedForest, loss: "Objective | LossFunction", denominator: float | None, *, trained_only: bool
    ) -> Loss:
        forest = ready.joined
        if not isinstance(loss, Objective):
            if denominator is not None:
                raise ConfigError("denominator= belongs to an objective; the loss of a function is used as it is.")
            of_function: Loss = features.values.FunctionLoss(forest, loss, trained_only=trained_only)
            return of_function
        kind = StepLoss if loss.is_separable(forest) else features.values.JointLoss
        own: StepLoss = kind(forest, loss, denominator, ready.terms if loss is ready.objective else None)
        if own.terms.tokens is not None:
            refuse_candidates(self.lm, own.terms.tokens)
        return own

    def _router_losses(
        self, rule: "RouterLossRule", plan: Plan, counts: "RouterCounts | None" = None
    ) -> "RouterLosses":
        add_up = None if self._context is None else self._context.add_up
        forest = plan.forest
        takes_recorded = rule.counts_recorded and forest.has_routes
        experts = features.routing.recorded_choices(self.lm, forest) if takes_recorded else None
        return features.router_loss.RouterLosses(rule, forest.multiplicity, counts, add_up, experts)

    @torch.no_grad()
    def evaluate(
        self, forests: Forests, objective: "Objective | LossFunction | None" = None, *, denominator: float | None = None
    ) -> StepOutput:
        """The loss and the metrics without gradients; arguments as in `step`."""
        objective = checked_objective(objective)
        ready = self._ready(forests, objective)
        self.check(ready.joined)
        walk, loss = self._begun(ready, objective, denominator)
        loss.evaluate(walk)
        return loss.output(walk)

    def count_experts(self, forests: Forests) -> "RouterCounts":
        """How often the routers choose each expert on some trees (`nn.router_loss.RouterCounts`), for a step that is
        spread over calls or ranks."""
        ready = forests if isinstance(forests, PreparedForest) else PreparedForest(one_forest(forests))
        rule = self.router_loss_rule
        if rule is None:
            raise ConfigError("the engine adds no router loss, so there is nothing to count.")

        @torch.no_grad()
        def counted() -> "RouterCounts":
            plan = self.plan(ready)
            losses = self._router_losses(rule, plan)
            self.new_walk(plan, more=[losses]).visit(lambda _: None)
            return losses.router_loss.counts()

        return with_less_memory(counted, self.budget, ready.joined.num_tokens)

    # -- windows ------------------------------------------------------------------------------------------------------

    @contextmanager
    def window(
        self, *, hold_tokens: int | None = None, max_tokens: int | None = None, max_bytes: int | None = None
    ) -> Iterator["Window"]:
        """Inside, calls share what they have in common, as if they were one; their gradients are there at the end.

        Steps, log-probs and hidden states answer at once; a backward records. An error inside drops all gradients.

        Parameters:
            hold_tokens: the most tokens whose graphs are kept until the end; beyond these the forward runs again. None:
                the budget, or what half of the free memory takes.
            max_tokens: the most tokens that are kept, with keys, values and hidden rows; a call beyond is computed by
                itself.
            max_bytes: the most bytes of these. None for both: a quarter of the free memory.

        Raises:
            ConfigError: a window within a window, weights that change in it, a backward after its end, or ranks that
                compute together.
            UnsupportedModelError: recurrent layers.
        """
        if self.in_window is not None:
            raise ConfigError("this engine is within a window already; leave it first.")
        window = self.in_window = features.window.new_window(self, hold_tokens, max_tokens, max_bytes)
        try:
            yield window
            window.end()
        except BaseException:
            window.drop()
            raise
        finally:
            self.in_window = None

    # -- values -------------------------------------------------------------------------------------------------------

    def logprobs(self, forests: Forests, *, trained_only: bool = False) -> list[Float[Tensor, " _"]]:
        """Log-probs of every trajectory: `result[i][j]` belongs to token `j + 1` of trajectory `i`.

        trained_only: only those of tokens that the trajectory trains (its loss weight is not 0), in order; prompts cost
        no projection. Without it a loss of yours has to leave out prompts and observations itself.

        float32 (float64 for float64 models), on the model's device, differentiable at any budget.
        """
        plan, on_tree = self.plan(forests), features.values
        values = self.values(plan, [on_tree.logprob_reader(plan.forest, trained_only=trained_only)])[0]
        restored: list[Tensor] = on_tree.restored_logprobs(values, plan.forest, trained_only=trained_only)
        return restored

    def hidden_states(self, forests: Forests) -> list[Float[Tensor, "_ M"]]:
        """Final hidden states of every trajectory: `result[i][j]` ([M], the model's dtype) depends on its tokens 0..j.

        They are taken after the decoder's last norm, as a value head or a reward head reads them; differentiable at any
        budget. A shared token has one row in memory, to which the gradients of all its trajectories add up.
        """
        plan, on_tree = self.plan(forests), features.values
        values = self.values(plan, [on_tree.hidden_reader(plan.forest)])[0]
        restored: list[Tensor] = on_tree.restore(values["hidden"], plan.forest)
        return restored

    @torch.no_grad()
    def scored(
        self,
        trajectories: Sequence[Trajectory],
        stream: str = "old_logprobs",
        *,
        all_tokens: bool = False,
        tree_of: Sequence[int] | None = None,
    ) -> list[Trajectory]:
        """The trajectories with their log-probs under this model as a stream, by one pass without gradients.

        Before the update, `engine.scored(items)` fills `old_logprobs`. For a reference use an engine of another model
        and `stream="ref_logprobs"`, or this one within PEFT's `with model.disable_adapter():`.

        stream: `old_logprobs`, `ref_logprobs` or `sampler_logprobs`. all_tokens: also tokens that no trajectory trains,
        which are 0 otherwise and cost no projection. tree_of: see `Forest.from_trajectories`.

        Raises:
            ConfigError: another stream.
        """
        check_choice("stream", stream, LOGPROB_STREAMS)
        items = list(trajectories)
        plan = self.plan(Forest.from_trajectories(items, tree_of=tree_of))
        is_needed = None if all_tokens else plan.forest.is_trained
        reader = features.values.token_reader(plan.forest, is_needed)
        values_T = self.values(plan, [reader])[0]["log_probs"].float().cpu().numpy()
        changes: list[dict[str, Any]] = [{stream: values_T[path]} for path in plan.forest.paths]
        return [replace(item, **change) for item, change in zip(items, changes, strict=True)]

    def values(self, plan: Plan, readers: "Sequence[Reader]", pixels_of: "PixelsOf | None" = None) -> list[Values]:
        """Each reader's values over the plan's forest, by name; differentiable at any budget (see `tree_values`).

        pixels_of: maps an image to its tensors; None: the engine's processor makes them. Afterwards `replay` is that of
        a `StepOutput`.
        """
        self.check(plan.forest)
        walk = self._walk(plan, self._guests(plan, pixels_of), reads_routers=any(r.reads_routers for r in readers))
        values: list[Values] = features.values.tree_values(walk, readers)
        if self.in_window is not None and type(walk) is Walk:  # by itself
            self.in_window.look_before_backward(tensor for value in values for tensor in value.values())
        self.replay = replay_of(walk.guests)
        return values

    # -- walks --------------------------------------------------------------------------------------------------------

    def new_walk(
        self,
        plan: Plan,
        *,
        images: Sequence[Guest] | None = None,
        more: Sequence[Guest] = (),
        reads_routers: bool = False,
    ) -> Walk:
        """A walk over a plan, after `check`. images: the plan's; None: made here. more: what joins it, too."""
        self.check(plan.forest)
        guests = [*self._guests(plan, images=images), *more]
        own = self.lm, plan, self.implementation, guests
        return Walk(*own, temperature=self.temperature, reads_routers=reads_routers)

    def _guests(
        self, plan: Plan, pixels_of: "PixelsOf | None" = None, images: Sequence[Guest] | None = None
    ) -> list[Guest]:
        """What joins every walk over a plan: other ranks, host memory, recorded experts, its images.

        Raises:
            ConfigError: ranks with different batches would have to exchange tokens, and nothing keeps their passes
                together.
        """
        if self._mesh is not None and self.lacks_lockstep:
            raise ConfigError(
                "experts are spread over ranks with different batches (ep_size > tp_size), which have to run the same "
                "passes: call engine.check(forest) with one forest on all ranks, then engine.enable_lockstep(...)."
            )
        always: tuple[Guest | None, ...] = self._context, self._lockstep, self._host_memory
        guests = [guest for guest in always if guest is not None]
        if plan.forest.has_routes:
            guests.append(features.routing.Replay(self.lm, plan.forest))
        if images is not None:
            return [*guests, *images]
        return [*guests, *self.images.guests(self.lm, plan, pixels_of)] if plan.forest.has_images else guests

    def check(self, forest: Forest) -> None:
        """Checks whether model and tokens can be trained, as the first step does.

        Raises:
            DataError: a token id beyond the vocabulary.
            UnsupportedModelError: active dropout, or a model that fails the probe. Gradients are probed where they are
                enabled.
        """
        self._checked(forest)

    def _checked(self, forest: Forest) -> list[nn.Parameter]:
        """As `check`; the model's parameters, which it has looked at."""
        if not self.lm.is_current:
            self.lm = split_model(self.model)
        if forest.has_routes:
            features.routing.install(self.lm.decoder)
        # Where ranks compute together, a forward of one rank alone would wait for the others for ever. Tensors of
        # images that a trainer gives (`values(pixels_of=)`) come without a processor for a flat row.
        processor = self.processor if self.computes_alone else None
        return self._checks.check(
            self.lm,
            self.implementation,
            forest,
            self.router_loss_rule,
            processor=processor,
            hold=self.hold,
            offload=self.offload,
            before_probe=None if self._batch_group is None else partial(self.plan, forest),
        )

    def is_checked(self, forest: Forest) -> bool:
        """Whether `check` of a forest of text would find a model that has passed as it is; its tokens are checked.

        Raises:
            DataError: a token id beyond the vocabulary.
        """
        if not self.lm.is_current:
            self.lm = split_model(self.model)
        return self._checks.passed(self.lm, forest)

    def check_again(self, forest: Forest) -> None:
        """`check`, whether or not the model has passed as it is."""
        self._checks.forget()
        self.check(forest)

    def stand_in_for(self, module: nn.Module) -> None:
        """`module.forward` is a function that calls this engine from now on, and no change of the model.

        Whoever replaces it has `check`, which calls the model's own forward, find the one before.
        """
        self._checks.stand_ins.add(module)

    @property
    def lacks_lockstep(self) -> bool:
        """Whether ranks with different batches exchange tokens, and nothing keeps their passes together yet."""
        return self._mesh is not None and self._mesh.needs_lockstep and self._lockstep is None

    def enable_lockstep(self, exchange: Callable[[str], list[str]]) -> None:
        """Runs every later walk in lockstep with the other ranks.

        Required with sharded parameters, whose gathers are collective. A rank calls `drain` when its walks of a step
        are done, also if it had none. A step that runs out of memory is not retried: the other ranks would be in the
        middle of theirs.

        exchange: sends this rank's text to all ranks and returns everybody's.
        """
        self._lockstep = self._new_lockstep(exchange)
        self.budget.recovers = False

    def walk_inside(self, shards: Any) -> None:
        """Another program has sharded the model, and walks run inside of its own forward and backward (`values`).

        The probe compares no gradients then: a backward of a few rows would end that of the program.

        shards: `distributed.others_shards.OthersShards`.

        Raises:
            ConfigError: `max_tokens="auto"`.
        """
        self.budget.fix("(FSDP2)")
        self._shards = shards
        self._checks.compares_gradients, self._checks.around_probe = False, shards.ends_whole

    @contextmanager
    def inside_lockstep(self, exchange: Callable[[str], list[str]]) -> Iterator[None]:
        """Inside, `values` run in lockstep with the other ranks, and so does their backward, later, within that of the
        program that sharded the model. exchange: see `enable_lockstep`."""
        within = partial(self._shards.within_backward, self.lm.decoder)
        self._lockstep = self._new_lockstep(exchange, within)
        try:
            yield
        finally:
            self._lockstep = None

    def _new_lockstep(self, exchange: Callable[[str], list[str]], *within: Any) -> "Lockstep":
        guests: list[Guest] = []
        found = features.lockstep.Lockstep(
            exchange, lambda plan: Walk(self.lm, plan, self.implementation, guests), *within
        )
        guests.append(found)
        return found

    def drain(self) -> None:
        """Runs empty passes until every rank has finished its walks of this step."""
        if self._lockstep is not None:
            self._lockstep.drain()


def wants_router_losses(config: PreTrainedConfig, wants_aux: bool | None) -> bool:
    """Whether steps add the load-balancing loss of a mixture; None: as the configuration says."""
    found = any(getattr(each, "output_router_logits", False) for each in (config, config.get_text_config()))
    return bool(found if wants_aux is None else wants_aux)
