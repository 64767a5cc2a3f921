"""Flat against tree: measures that a model, on the user's own rows, gets the loss and gradients of flat training.

The flat side is plain code without trees: the model's own forward on one trajectory at a time, a logsumexp, a weighted
sum (or the objective's own formulas), `backward`; see `engine.flat`. The tree side is `TreeEngine`, as training
uses it.

Tolerances. float32: 1e-5 for the whole gradient; rounding alone gives 3e-7 on tiny models and 3e-6 on SmolLM2-135M,
whose flat gradient is as far from float64. float64: 1e-6, because transformers computes norms in float32 in most
models whatever the dtype, so gradients are rounded there (5e-8 on a small Llama whose log-probs agree to 1e-15).
bfloat16 and float16: rounding is larger than any fixed tolerance that still detects faults, so both sides are compared
with flat training of a float32 copy, and the tree may deviate 1.5 times as much as flat training itself does.

Letters: L tokens of one trajectory.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from treewise.engine.engine import TreeEngine
from treewise.engine.flat import FlatLoss, Loss
from treewise.errors import ConfigError, bytes_as_text
from treewise.nn.device import free_bytes, synchronized_clock
from treewise.nn.gradients import gradients_restored, take_gradients, zero_gradients
from treewise.nn.model_flops import flop_model
from treewise.objectives import SFT, Objective
from treewise.planning.plans import Plan
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory
from treewise.verification.report import ParameterError, VerificationReport

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
LOW_PRECISION = (torch.bfloat16, torch.float16)
# What a low-precision tree may deviate from float32, in units of what low-precision flat training deviates.
MAX_TIMES_FLAT = 1.5
# A parameter's error is relative to its own gradient, but at least to this part of the whole gradient's norm: some
# gradients are zero but for rounding (biases of keys, which a softmax cancels).
SMALLEST_NORM_RATIO = 1e-3
# Log-probs and single parameters average less rounding away than the whole gradient does.
LOGPROB_FACTOR = 10
PARAMETER_FACTOR = 100


def verify(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    max_tokens: int | None = None,
    *,
    attention: str = "auto",
    objective: Objective | Loss | None = None,
    tolerance: float | None = None,
    processor: object = None,
) -> VerificationReport:
    """Compares loss, log-probs and gradients of every trajectory alone with those of all of them as trees.

    The model runs as in `eval()`, since dropout would differ between the two; its mode, its `.grad`s and the state of
    the random generators are restored. Needs memory for the model, two gradients and one trajectory; a low-precision
    model also needs a float32 copy and its gradient, unless `tolerance` is given.

    Parameters:
        max_tokens: budget of a micro-batch; None for whole trees, and again at half of the largest tree (`at_budget`).
        attention: an implementation, or `auto`.
        objective: `SFT()` if None; any other one, or a function from the list of log-probs to a scalar, as in
            `TreeEngine.step`. Losses that are no sum over tokens take two flat passes.
        tolerance: relative error allowed in the whole gradient, in place of that for the model's dtype. Low-precision
            models are then compared with flat training in their own dtype.
        processor: the model's processor (`transformers.AutoProcessor`), for trajectories with images.

    Raises:
        ConfigError: an objective that flat rows cannot express, or a tolerance that is not positive.
        DataError: a stream that the objective needs is missing, or a token id beyond the vocabulary.
        UnsupportedModelError: a model that cannot follow a tree.
    """
    items = list(trajectories)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"verify takes a model, found a {type(model).__name__}; load it first.")
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"tolerance is {tolerance}; give a positive relative error, or None.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{type(model).__name__} has no trained parameter; nothing to compare.")
    objective = SFT() if objective is None else objective
    forest = Forest.from_trajectories(items)
    loss = FlatLoss(items, objective, processor)
    largest = int(np.diff([*np.flatnonzero(forest.parent < 0), forest.num_tokens]).max())  # tree
    half = max(1, largest // 2, forest.images.largest)
    budgets = [max_tokens] if max_tokens is not None else [None, half]
    engines = [  # the flat side has the tokens' loss alone; one probe is enough
        TreeEngine(model, budget, attention, router_aux_loss=False, processor=processor, check=budget == budgets[0])
        for budget in budgets
    ]
    dtype = _lowest_dtype(model)
    with _state_restored(model):
        engines[0].check(forest)
        flat = _run_flat(model, loss)
        wide = _run_wide_copy(model, loss) if dtype in LOW_PRECISION and tolerance is None else None
        flat_errors = None if wide is None else _compare(wide, flat)
        limits = _limits(dtype, tolerance, flat_errors, (wide or flat).size)
        reports = []
        for engine in engines:
            sides = _Sides(flat, wide, _run_tree(engine, model, forest, objective))
            reports.append(_report(engine, engine.plan(forest), dtype, sides, flat_errors, limits))
    return replace(reports[0], at_budget=reports[1]) if len(reports) > 1 else reports[0]


# -- the two sides ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """One side: loss, the sum of the sizes of its terms, log-probs ([L - 1] per trajectory, float64 on the host),
    gradients by name."""

    loss: float
    size: float
    logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    seconds: float
    num_computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Sides:
    """Flat training, flat training of a float32 copy where that is the reference, tree training."""

    flat: _Run
    wide: _Run | None
    tree: _Run


def _run_flat(model: nn.Module, loss: FlatLoss) -> _Run:
    """Every trajectory alone, by the model's own forward."""
    device = _device(model)
    loss.warm_up(model, device)
    zero_gradients(model)
    started = synchronized_clock(device)
    flat = loss.run(model, device)
    seconds = synchronized_clock(device) - started
    return _Run(flat.loss, flat.size, flat.logprobs, take_gradients(model), seconds)


def _run_wide_copy(model: nn.Module, loss: FlatLoss) -> _Run:
    """The flat side of a float32 copy."""
    needed = 4 * (
        sum(p.numel() for p in model.parameters()) + sum(p.numel() for p in model.parameters() if p.requires_grad)
    )
    free = free_bytes(_device(model))
    if needed > free:
        raise ConfigError(
            f"a float32 copy and its gradient need {bytes_as_text(needed)}, of which {bytes_as_text(free)} are free; "
            "give tolerance= to compare with flat training in the model's own dtype."
        )
    wide = copy.deepcopy(model).float()
    return _run_flat(wide, loss)


def _run_tree(engine: TreeEngine, model: nn.Module, forest: Forest, objective: Objective | Loss) -> _Run:
    """All trajectories as trees, by the engine."""
    device = _device(model)
    engine.check(forest)  # its probe is no part of the seconds
    with torch.no_grad():
        logprobs = [each.double().cpu() for each in engine.logprobs(forest)]
    zero_gradients(model)
    started = synchronized_clock(device)
    out = engine.step(forest, objective)
    seconds = synchronized_clock(device) - started
    loss = float(out.loss)
    return _Run(loss, abs(loss), logprobs, take_gradients(model), seconds, int(out.num_computed_tokens))


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Errors:
    loss: float
    max_logprob: float
    rms_logprob: float
    gradient: float
    gradient_norm: float
    parameters: tuple[ParameterError, ...]


def _compare(reference: _Run, other: _Run) -> _Errors:
    """Errors of one run relative to another, parameter by parameter; worst parameter first, NaN before all."""
    difference = torch.cat(other.logprobs) - torch.cat(reference.logprobs)
    norms, gaps = {}, {}
    for name, gradient in reference.gradients.items():
        wide = gradient.double()
        norms[name] = wide.norm().item()
        gaps[name] = (other.gradients[name].to(wide) - wide).norm().item()
    norm = math.hypot(*norms.values())
    rows = [
        ParameterError(name, norms[name], _ratio(gaps[name], max(norms[name], SMALLEST_NORM_RATIO * norm)))
        for name in norms
    ]
    rows.sort(key=lambda row: math.inf if math.isnan(row.error) else row.error, reverse=True)
    return _Errors(
        loss=_ratio(abs(other.loss - reference.loss), reference.size),  # of terms that may cancel
        max_logprob=difference.abs().max().item(),
        rms_logprob=difference.square().mean().sqrt().item(),
        gradient=_ratio(math.hypot(*gaps.values()), norm),
        gradient_norm=norm,
        parameters=tuple(rows),
    )


def _report(
    engine: TreeEngine,
    plan: Plan,
    dtype: torch.dtype,
    sides: _Sides,
    flat_errors: _Errors | None,
    limits: dict[str, float],
) -> VerificationReport:
    flat, wide, tree, forest = sides.flat, sides.wide, sides.tree, plan.forest
    reference = flat if wide is None else wide
    errors, flops = _compare(reference, tree), flop_model(engine.model)
    return VerificationReport(
        model=type(engine.model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        attention=engine.attention,
        max_tokens=plan.max_tokens,
        num_micro_batches=plan.num_micro_batches,
        num_trajectories=forest.num_trajectories,
        num_trees=forest.num_trees,
        num_flat_tokens=forest.num_flat_tokens,
        num_tree_tokens=forest.num_tokens,
        num_computed_tokens=tree.num_computed_tokens,
        num_trained_tokens=sum(item.num_trained_tokens for item in forest.trajectories),
        reference="flat training" if wide is None else "flat training of a float32 copy",
        loss_flat=reference.loss,
        loss_tree=tree.loss,
        loss_error=errors.loss,
        max_logprob_error=errors.max_logprob,
        rms_logprob_error=errors.rms_logprob,
        gradient_norm=errors.gradient_norm,
        gradient_error=errors.gradient,
        flat_loss_error=None if flat_errors is None else flat_errors.loss,
        flat_rms_logprob_error=None if flat_errors is None else flat_errors.rms_logprob,
        flat_gradient_error=None if flat_errors is None else flat_errors.gradient,
        limits=limits,
        parameters=errors.parameters,
        seconds_flat=flat.seconds,
        seconds_tree=tree.seconds,
        flop_bound=flops.native_flat(forest) / flops.planned(plan),
    )


def _limits(dtype: torch.dtype, tolerance: float | None, flat: _Errors | None, size: float) -> dict[str, float]:
    """The largest allowed errors, by name. size: the sum of the sizes of the loss's terms."""
    if flat is not None:
        # A loss is a mean, so flat training may equal it by chance; its log-probs bound the error to expect.
        loss_error = max(flat.loss, _ratio(flat.rms_logprob, size))
        flat_errors = {"loss": loss_error, "rms_logprob": flat.rms_logprob, "gradient": flat.gradient}
        return {name: MAX_TIMES_FLAT * error for name, error in flat_errors.items()}
    allowed = tolerance if tolerance is not None else TOLERANCE[dtype]
    return {
        "loss": allowed,
        "max_logprob": LOGPROB_FACTOR * allowed,
        "gradient": allowed,
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
    devices = [_device(model)] if _device(model).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), gradients_restored(model):
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
