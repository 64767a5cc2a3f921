"""Flat against tree: measures that a model, on the user's own rows, gets the loss and gradients of flat training.

The flat side is plain code without trees: the model's own forward on one trajectory at a time, a logsumexp, a weighted
sum (or the objective's own formulas) and the losses on routers, `backward`; see `engine.flat`. The tree side is
`TreeEngine`, as training uses it: a step, and a backward through `engine.logprobs` from the gradients of the same loss.

Tolerances: `nn.whole_gradients`. In bfloat16 and float16, of parameters or under autocast, both sides are compared with
flat training in float32.

Letters: L tokens of one trajectory.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import nn

from treewise.base.progress import busy_with
from treewise.engine.engine import TreeEngine
from treewise.engine.flat import FlatLoss, Loss
from treewise.errors import ConfigError, bytes_as_text, num
from treewise.nn.device import random_state_kept, synchronized_clock
from treewise.nn.gradients import gradients_restored
from treewise.nn.model_flops import flop_model
from treewise.nn.platform.memory import free_bytes
from treewise.nn.router_loss import RouterLossRule
from treewise.nn.whole_gradients import (
    LOW_PRECISION,
    MAX_TIMES_FLAT,
    TOLERANCE,
    Gradients,
    take_gradients,
    zero_gradients,
)
from treewise.objectives import SFT, Objective
from treewise.planning.plans import Plan
from treewise.tree.forest import Forest, one_forest
from treewise.tree.trajectory import Trajectory
from treewise.verification.report import ParameterError, VerificationReport
from treewise.verification.rows import PlanFacts, small_plans, trees_of

# A parameter's error is relative to its own gradient, but at least to this part of the whole gradient's norm: some
# gradients are zero but for rounding (biases of keys, which a softmax cancels).
SMALLEST_NORM_RATIO = 1e-3
# Log-probs and single parameters average less rounding away than the whole gradient does.
LOGPROB_FACTOR = 10
PARAMETER_FACTOR = 100


def verify(
    model: nn.Module,
    trajectories: Sequence[Trajectory] | Forest,
    max_tokens: int | Sequence[int | None] | None = None,
    *,
    attention: str = "auto",
    objective: Objective | Loss | None = None,
    tolerance: float | None = None,
    processor: object = None,
    temperature: float = 1.0,
    offload: bool = False,
    router_aux_loss: bool | None = None,
    router_z_coefficient: float = 0.0,
    router_loss_choices: Literal["live", "replayed"] = "live",
    autocast: torch.dtype | None = None,
) -> VerificationReport:
    """Compares loss, log-probs and gradients of every trajectory alone with those of all of them as trees.

    Compared are a step of the loss that the run trains, with its losses on routers, and a backward through
    `engine.logprobs`. The model runs as in `eval()`, since dropout would differ between the two; its mode, its `.grad`s
    and the state of the random generators are restored. Needs memory for the model, two gradients (three where the loss
    depends on more than log-probs) and one trajectory; a low-precision model also needs a float32 copy and its
    gradient, unless `tolerance` is given.

    Parameters:
        trajectories: what is trained, merged; or a forest, whose trees stay as they are.
        max_tokens: the budget of the run, in tokens of a micro-batch. Where all trees fit into it, or with None, they
            are computed whole and again at half of the largest tree; and always some rows, cut short, at a budget so
            small that it has four levels of gateways and rows with gaps (`report.at_budgets`). Several: these alone.
        attention: an implementation, or `auto`.
        objective: `SFT()` if None; any other one, or a function from the list of log-probs to a scalar, as in
            `TreeEngine.step`. Losses that are no sum over tokens take two flat passes.
        tolerance: relative error allowed in the whole gradient, in place of that for the model's dtype. Low-precision
            models are then compared with flat training in their own dtype.
        processor: the model's processor (`transformers.AutoProcessor`), for trajectories with images.
        temperature, offload, router_aux_loss, router_z_coefficient, router_loss_choices: of the run's engine, as in
            `TreeEngine`.
        autocast: the dtype of that around the run's steps.

    Raises:
        ConfigError: an objective that flat rows cannot express, or a tolerance that is not positive.
        DataError: a stream that the objective needs is missing, or a token id beyond the vocabulary.
        UnsupportedModelError: a model that cannot follow a tree.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"verify takes a model, found a {type(model).__name__}; load it first.")
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"tolerance is {tolerance}; give a positive relative error, or None.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{type(model).__name__} has no trained parameter; nothing to compare.")
    forest = one_forest(trajectories)

    def new_engine(budget: int | None, is_probed: bool) -> TreeEngine:
        return TreeEngine(
            model,
            budget,
            attention,
            temperature=temperature,
            check=not is_probed,
            offload=offload,
            router_aux_loss=router_aux_loss,
            router_z_coefficient=router_z_coefficient,
            router_loss_choices=router_loss_choices,
            processor=processor,
        )

    side = _Sides(model, new_engine, autocast, tolerance)
    reports = []
    with _state_restored(model):
        for rows, budgets in _compared(forest, objective, max_tokens):
            is_cut = rows is not forest
            # A function may know how long the trajectories are.
            loss: Objective | Loss = SFT() if objective is None or (is_cut and not _has_terms(objective)) else objective
            reports += side.compare(rows, loss, budgets, is_cut=is_cut)
    return replace(reports[0], at_budgets=tuple(reports[1:]))


def _has_terms(objective: Objective | Loss) -> bool:
    return isinstance(objective, Objective)


def _compared(
    forest: Forest, objective: Objective | Loss | None, max_tokens: int | Sequence[int | None] | None
) -> Iterator[tuple[Forest, list[int | None]]]:
    """What is compared: rows, and budgets for them."""
    if isinstance(max_tokens, Sequence):
        if not max_tokens:
            raise ConfigError("max_tokens is an empty list; give at least one budget, or None.")
        yield forest, list(max_tokens)
        return
    largest = int(np.diff([*np.flatnonzero(forest.parent < 0), forest.num_tokens]).max())  # tree
    half = max(1, largest // 2, forest.images.largest)
    is_whole = max_tokens is None or max_tokens >= forest.num_tokens
    yield forest, [max_tokens, half] if is_whole and half < forest.num_tokens else [max_tokens]
    for plan in small_plans(forest, whole_groups=getattr(objective, "needs_whole_groups", False)):
        yield plan.forest, [plan.max_tokens]


# -- the two sides ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Side:
    """One side: loss, the sum of the sizes of its terms, log-probs ([L - 1] per trajectory, float64 on the host), and
    gradients by name: of the loss, and through the log-probs (None: they are the same). reaches: whether anything that
    is trained is reached."""

    loss: float
    size: float
    logprobs: list[torch.Tensor]
    gradients: Gradients
    seconds: float
    of_values: Gradients | None = None
    reaches: bool = True

    @property
    def through_values(self) -> Gradients:
        return self.gradients if self.of_values is None else self.of_values


class _Sides:
    """Runs both sides of a comparison."""

    def __init__(
        self,
        model: nn.Module,
        new_engine: Callable[[int | None, bool], TreeEngine],
        autocast: torch.dtype | None,
        tolerance: float | None,
    ) -> None:
        self.model, self._new_engine = model, new_engine
        self.autocast, self.tolerance = autocast, tolerance
        self.device, self.dtype = _device(model), _lowest_dtype(model) if autocast is None else autocast
        self._is_probed = False

    def compare(
        self, forest: Forest, objective: Objective | Loss, budgets: Sequence[int | None], *, is_cut: bool
    ) -> list[VerificationReport]:
        """One report for each budget."""
        engines = [self._engine(budget) for budget in budgets]
        engine = engines[0]
        loss = _flat_loss(engine, forest, objective, engine.router_loss_rule)
        flat_sft = _flat_loss(engine, forest, SFT(), None)
        with self._as_run():
            engine.check(forest)
            flat, slopes = self._run_flat(self.model, loss, flat_sft)
        if not flat.reaches and not is_cut:
            raise ConfigError(
                f"{num(forest.num_trajectories, 'row')}: none reaches a parameter of {type(self.model).__name__} that "
                "is trained, so there is no gradient to compare (a tower of images needs rows with images)."
            )
        wide = self._run_wide(loss, flat_sft) if self.dtype in LOW_PRECISION and self.tolerance is None else None
        flat_errors = None if wide is None else _flat_errors(wide, flat)
        limits = _limits(self.dtype, self.tolerance, flat_errors, (wide or flat).size)
        reports = []
        for engine in engines:
            plan = engine.plan(forest)
            with busy_with(f"comparing {_where(plan, is_cut=is_cut)}"):
                with self._as_run():
                    through_values = self._through_values(engine, plan, wide or flat, slopes)
                    tree = self._run_tree(engine, plan, objective, through_values)
                sides = _Compared(engine, plan, is_cut, flat, wide, tree)
                reports.append(_report(sides, self.dtype, through_values.errors, flat_errors, limits))
        return reports

    def _engine(self, budget: int | None) -> TreeEngine:
        """As a run has it; one probe is enough."""
        engine = self._new_engine(budget, self._is_probed)
        self._is_probed = True
        return engine

    @contextmanager
    def _as_run(self) -> Iterator[None]:
        """Under the autocast of the run."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            yield

    @busy_with("flat training")
    def _run_flat(self, model: nn.Module, loss: FlatLoss, sft: FlatLoss) -> tuple[_Side, list[torch.Tensor]]:
        """Every trajectory alone, by the model's own forward; and the factors of its log-probs in the values that are
        compared: the gradients of the loss, or where it depends on more than log-probs, those of SFT's."""
        loss.warm_up(model, self.device)
        zero_gradients(model)
        started = synchronized_clock(self.device)
        flat = loss.run(model, self.device)
        seconds = synchronized_clock(self.device) - started
        run = _Side(flat.loss, flat.size, flat.logprobs, take_gradients(model), seconds, reaches=flat.reaches)
        if flat.slopes is not None:
            return run, flat.slopes
        zero_gradients(model)
        again = sft.run(model, self.device)
        run.of_values = take_gradients(model)
        assert again.slopes is not None
        return run, again.slopes

    def _run_wide(self, loss: FlatLoss, sft: FlatLoss) -> _Side:
        """The flat side in float32: of the model without autocast, or of a copy."""
        model = self.model
        if _lowest_dtype(model) in LOW_PRECISION:
            num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            needed, free = 4 * (sum(each.numel() for each in model.parameters()) + num_trained), free_bytes(self.device)
            if needed > free:
                raise ConfigError(
                    f"a float32 copy and its gradient need {bytes_as_text(needed)}, of which {bytes_as_text(free)} are "
                    "free; give tolerance= to compare with flat training in the model's own dtype."
                )
            model = copy.deepcopy(model).float()
        return self._run_flat(model, loss, sft)[0]

    def _through_values(
        self, engine: TreeEngine, plan: Plan, reference: _Side, slopes: list[torch.Tensor]
    ) -> "_ThroughValues":
        """The engine's log-probs, and the errors of the gradients that a backward through them gives."""
        engine.check(plan.forest)  # its probe is no part of the seconds of a step
        zero_gradients(self.model)
        logprobs = engine.logprobs(plan.forest)
        reached = [(own, each.to(own.dtype)) for own, each in zip(logprobs, slopes, strict=True) if own.requires_grad]
        if reached:  # not by rows cut short before their image, where the tower alone is trained
            values, grads = zip(*reached, strict=True)
            torch.autograd.backward(values, grads)
        errors = _gradient_errors(reference.through_values, take_gradients(self.model))
        return _ThroughValues([logprob.detach().double().cpu() for logprob in logprobs], errors)

    def _run_tree(
        self, engine: TreeEngine, plan: Plan, objective: Objective | Loss, through_values: "_ThroughValues"
    ) -> _Side:
        """A step on all trajectories as trees, by the engine."""
        zero_gradients(self.model)
        started = synchronized_clock(self.device)
        out = engine.step(plan.forest, objective)
        seconds = synchronized_clock(self.device) - started
        loss = float(out.loss)
        return _Side(loss, abs(loss), through_values.logprobs, take_gradients(self.model), seconds)


def _flat_loss(
    engine: TreeEngine, forest: Forest, objective: Objective | Loss, routers: RouterLossRule | None
) -> FlatLoss:
    """Of the trajectories alone, as the engine trains them."""
    return FlatLoss(
        forest.trajectories,
        objective,
        engine.processor,
        temperature=engine.temperature,
        routers=routers,
        trees=trees_of(forest),
    )


def _where(plan: Plan, *, is_cut: bool) -> str:
    rows = f"{num(plan.forest.num_trajectories, 'row')} cut short" if is_cut else "trees"
    return f"{rows}, whole" if plan.is_whole else f"{rows} under max_tokens {plan.max_tokens:,}"


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GradientErrors:
    """whole: norm of the difference / norm. norm: of the whole gradient. parameters: worst first."""

    whole: float
    norm: float
    parameters: tuple[ParameterError, ...]


@dataclass(frozen=True, slots=True)
class _ThroughValues:
    """[L - 1] log-probs of each trajectory, float64 on the host, and errors of the gradients through them."""

    logprobs: list[torch.Tensor]
    errors: _GradientErrors


@dataclass(frozen=True, slots=True)
class _Errors:
    loss: float
    max_logprob: float
    rms_logprob: float
    gradient: _GradientErrors


@dataclass(frozen=True, slots=True)
class _Compared:
    """An engine with its plan, and what each side gave: flat training, the same in float32 where that is the reference,
    the tree."""

    engine: TreeEngine
    plan: Plan
    is_cut: bool
    flat: _Side
    wide: _Side | None
    tree: _Side

    @property
    def reference(self) -> _Side:
        return self.flat if self.wide is None else self.wide


def _gradient_errors(expected: Gradients, found: Gradients) -> _GradientErrors:
    """Errors of gradients, parameter by parameter; NaN before all."""
    norms, gaps = {}, {}
    for name, gradient in expected.items():
        wide = gradient.double()
        norms[name] = wide.norm().item()
        gaps[name] = (found[name].to(wide) - wide).norm().item()
    norm = math.hypot(*norms.values())
    rows = [
        ParameterError(name, norms[name], _ratio(gaps[name], max(norms[name], SMALLEST_NORM_RATIO * norm)))
        for name in norms
    ]
    rows.sort(key=_badness, reverse=True)
    return _GradientErrors(_ratio(math.hypot(*gaps.values()), norm), norm, tuple(rows))


def _compare(reference: _Side, other: _Side) -> _Errors:
    """Errors of one run relative to another."""
    difference = torch.cat(other.logprobs) - torch.cat(reference.logprobs)
    return _Errors(
        loss=_ratio(abs(other.loss - reference.loss), reference.size),  # of terms that may cancel
        max_logprob=difference.abs().max().item(),
        rms_logprob=difference.square().mean().sqrt().item(),
        gradient=_gradient_errors(reference.gradients, other.gradients),
    )


def _report(
    sides: _Compared,
    dtype: torch.dtype,
    of_values: _GradientErrors,
    flat_errors: "_FlatErrors | None",
    limits: dict[str, float],
) -> VerificationReport:
    engine, plan, forest = sides.engine, sides.plan, sides.plan.forest
    errors, flops, facts = _compare(sides.reference, sides.tree), flop_model(engine.model), PlanFacts.of(plan)
    worst: dict[str, ParameterError] = {}  # of both gradients of a parameter
    for each in sorted((*errors.gradient.parameters, *of_values.parameters), key=_badness, reverse=True):
        worst.setdefault(each.name, each)
    return VerificationReport(
        model=type(engine.model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        attention=engine.attention,
        max_tokens=plan.max_tokens,
        num_micro_batches=plan.num_micro_batches,
        num_levels=facts.num_levels,
        has_gap=facts.has_gap,
        is_cut=sides.is_cut,
        num_trajectories=forest.num_trajectories,
        num_trees=forest.num_trees,
        num_flat_tokens=forest.num_flat_tokens,
        num_tree_tokens=forest.num_tokens,
        num_computed_tokens=plan.num_computed_tokens,
        num_trained_tokens=sum(item.num_trained_tokens for item in forest.trajectories),
        reference="flat training" if sides.wide is None else "flat training in float32",
        loss_flat=sides.reference.loss,
        loss_tree=sides.tree.loss,
        loss_error=errors.loss,
        max_logprob_error=errors.max_logprob,
        rms_logprob_error=errors.rms_logprob,
        gradient_norm=errors.gradient.norm,
        gradient_error=errors.gradient.whole,
        values_error=of_values.whole,
        flat_loss_error=None if flat_errors is None else flat_errors.loss,
        flat_rms_logprob_error=None if flat_errors is None else flat_errors.rms_logprob,
        flat_gradient_error=None if flat_errors is None else flat_errors.gradient,
        limits=limits,
        parameters=tuple(worst.values()),
        seconds_flat=sides.flat.seconds,
        seconds_tree=sides.tree.seconds,
        flop_bound=flops.native_flat(forest) / flops.planned(plan),
    )


def _badness(row: ParameterError) -> float:
    return math.inf if math.isnan(row.error) else row.error


@dataclass(frozen=True, slots=True)
class _FlatErrors:
    """Errors of flat training in low precision. values: of the gradients through its log-probs."""

    loss: float
    rms_logprob: float
    gradient: float
    values: float


def _flat_errors(wide: _Side, flat: _Side) -> _FlatErrors:
    errors = _compare(wide, flat)
    values = _gradient_errors(wide.through_values, flat.through_values).whole
    return _FlatErrors(errors.loss, errors.rms_logprob, errors.gradient.whole, values)


def _limits(dtype: torch.dtype, tolerance: float | None, flat: _FlatErrors | None, size: float) -> dict[str, float]:
    """The largest allowed errors, by name. size: the sum of the sizes of the loss's terms."""
    if flat is not None:
        # A loss is a mean, so flat training may equal it by chance; its log-probs bound the error to expect.
        loss_error = max(flat.loss, _ratio(flat.rms_logprob, size))
        flat_errors = {
            "loss": loss_error,
            "rms_logprob": flat.rms_logprob,
            "gradient": flat.gradient,
            "values": flat.values,
        }
        return {name: MAX_TIMES_FLAT * error for name, error in flat_errors.items()}
    allowed = tolerance if tolerance is not None else TOLERANCE[dtype]
    return {
        "loss": allowed,
        "max_logprob": LOGPROB_FACTOR * allowed,
        "gradient": allowed,
        "values": allowed,
        "worst_parameter": PARAMETER_FACTOR * allowed,
    }


def _ratio(error: float, norm: float) -> float:
    if norm == 0:
        return 0.0 if error == 0 else math.inf
    return error / norm


# -- the state of the model -------------------------------------------------------------------------------------------


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; modes, gradients and random generators as they were afterwards."""
    modes = {module: module.training for module in model.modules()}
    with random_state_kept(_device(model)), torch.enable_grad(), gradients_restored(model):
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _lowest_dtype(model: nn.Module) -> torch.dtype:
    """The least precise floating dtype among the parameters: what limits the numerics."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    if lowest not in TOLERANCE and lowest not in LOW_PRECISION:
        raise ConfigError(f"the model has parameters in {lowest}; verify it in bfloat16 or float32.")
    return lowest


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
