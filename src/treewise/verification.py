"""Flat against tree: the proof that a model, on the user's own rows, gets the loss and gradients of flat training.

The flat side is plain code that knows nothing of trees: the model's own forward on one trajectory at a time, a
logsumexp, a weighted sum, `backward`. The tree side is `TreeEngine`, as training uses it.

Tolerances. float32: 1e-5 for the whole gradient; rounding alone makes 3e-7 on tiny models and 3e-6 on SmolLM2-135M,
whose flat gradient is as far from float64. float64: 1e-6, because transformers computes norms in float32 in most
models whatever the dtype, so gradients are rounded there (5e-8 on a small Llama whose log-probs agree to 1e-15).
bfloat16 and float16: rounding is larger than any fixed tolerance that still finds faults, so both sides are held
against flat training of a float32 copy, and the tree may deviate 1.5 times as much as flat training itself does.

Letters: V vocabulary, L tokens of one trajectory.
"""

import copy
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import nn

from treewise.engine import TreeEngine
from treewise.errors import ConfigError
from treewise.flops import flop_model
from treewise.forest import Forest
from treewise.memory import free_bytes
from treewise.objectives import SFT
from treewise.trajectory import Trajectory, number_rollouts
from treewise.verified import ParameterError, VerificationReport

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
LOW_PRECISION = (torch.bfloat16, torch.float16)
# What a low-precision tree may deviate from float32, in units of what low-precision flat training deviates.
MAX_TIMES_FLAT = 1.5
# A parameter's error is relative to its own gradient, but at least to this share of the whole gradient: some gradients
# are zero but for rounding (biases of keys, which a softmax cancels).
SMALLEST_SHARE = 1e-3
# Log-probs and single parameters average less rounding away than the whole gradient does.
LOGPROB_FACTOR = 10
PARAMETER_FACTOR = 100


def verify(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    max_tokens: int | None = None,
    *,
    attention: str = "auto",
    objective: SFT | None = None,
    tolerance: float | None = None,
) -> VerificationReport:
    """Compares loss, log-probs and gradients of every trajectory alone with those of all of them as trees.

    The model runs as in `eval()`, since dropout would differ between the two; its mode, its `.grad`s and the state of
    the random generators are restored. Needs memory for the model, two gradients and one trajectory; a low-precision
    model also needs a float32 copy and its gradient, unless `tolerance` is given.

    Parameters:
        max_tokens: budget of a micro-batch; None for whole trees.
        attention: an implementation, or `auto`.
        tolerance: relative error allowed in the whole gradient, in place of the one of the model's dtype. Low-precision
            models are then compared with flat training in their own dtype.

    Raises:
        ConfigError: an objective whose flat form is not known here, or a tolerance that is not positive.
        UnsupportedModelError: a model that cannot follow a tree.
    """
    items = list(trajectories)
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"tolerance is {tolerance}; give a positive relative error, or None.")
    objective = SFT() if objective is None else objective
    forest = Forest.from_trajectories(items)
    weights = flat_weights(items, objective)
    engine = TreeEngine(model, max_tokens, attention, router_aux_loss=False)  # the flat side has the tokens' loss alone
    dtype = _lowest_dtype(model)
    with _as_found(model):
        flat = _run_flat(model, items, weights)
        wide = _run_wide_copy(model, items, weights) if dtype in LOW_PRECISION and tolerance is None else None
        tree = _run_tree(engine, model, forest, objective)
    reference = flat if wide is None else wide
    errors = _compare(reference, tree)
    flat_errors = None if wide is None else _compare(wide, flat)
    flops = flop_model(model)
    return VerificationReport(
        model=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        attention=attention,
        max_tokens=max_tokens,
        num_micro_batches=engine.plan(forest).num_micro_batches,
        num_trajectories=forest.num_trajectories,
        num_trees=forest.num_trees,
        num_flat_tokens=forest.num_flat_tokens,
        num_tree_tokens=forest.num_tokens,
        num_computed_tokens=tree.num_computed_tokens,
        num_trained_tokens=sum(item.num_trained_tokens for item in items),
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
        limits=_limits(dtype, tolerance, flat_errors, reference.loss),
        parameters=errors.parameters,
        seconds_flat=flat.seconds,
        seconds_tree=tree.seconds,
        flop_bound=flops.native_flat(forest) / flops.planned(engine.plan(forest)),
    )


def flat_weights(trajectories: Sequence[Trajectory], objective: SFT) -> list[np.ndarray]:
    """What each token's negative log-prob is multiplied by in the flat loss ([L] float64 per trajectory).

    Written from the definition of the objective, without a tree: a prefix is known by the hash of its tokens.

    Raises:
        ConfigError: an objective other than `SFT`.
    """
    if not isinstance(objective, SFT):
        raise ConfigError(f"verify knows the flat form of SFT, not of {type(objective).__name__}; verify with SFT().")
    weights = [np.asarray(item.loss_weights, dtype=np.float64) for item in trajectories]
    rollouts = number_rollouts(trajectories)
    if objective.weighting != "per_trajectory":
        of_rollout = rollouts if objective.weighting == "per_rollout" else np.zeros_like(rollouts)
        keys = [
            [(rollout, key) for key in _prefix_keys(item.token_ids)]
            for rollout, item in zip(of_rollout.tolist(), trajectories, strict=True)
        ]
        trains = Counter(
            key for each, weight in zip(keys, weights, strict=True) for key, w in zip(each, weight, strict=True) if w
        )
        weights = [weight / [max(1, trains[key]) for key in each] for each, weight in zip(keys, weights, strict=True)]
    if objective.normalization == "trajectory_mean":
        return [weight / weight.sum() / len(weights) for weight in weights]
    if objective.normalization == "rollout_mean":
        totals = np.bincount(rollouts, weights=[weight.sum() for weight in weights])
        return [weight / totals[rollout] / len(totals) for rollout, weight in zip(rollouts, weights, strict=True)]
    if objective.normalization == "constant":
        assert objective.constant is not None
        return [weight / objective.constant for weight in weights]
    total = sum(weight.sum() for weight in weights)
    return [weight / total for weight in weights]


# -- the two sides ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """One side: loss, log-probs ([L - 1] per trajectory, float64 on the host), gradients by name."""

    loss: float
    logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    seconds: float
    num_computed_tokens: int = 0


def _run_flat(model: nn.Module, items: Sequence[Trajectory], weights: Sequence[np.ndarray]) -> _Run:
    """Every trajectory alone, by the model's own forward."""
    device = _device(model)
    longest = max(range(len(items)), key=lambda index: len(items[index]))
    _flat_step(model, items[longest], weights[longest], device)  # touches the memory that the timed run uses
    _clear_gradients(model)
    loss, logprobs = 0.0, []
    started = _now(device)
    for item, weight in zip(items, weights, strict=True):
        value, found = _flat_step(model, item, weight, device)
        loss += value
        logprobs.append(found.double().cpu())
    return _Run(loss, logprobs, _take_gradients(model), _now(device) - started)


def _flat_step(
    model: nn.Module, item: Trajectory, weight: np.ndarray, device: torch.device
) -> tuple[float, torch.Tensor]:
    ids = torch.tensor(item.token_ids, dtype=torch.long, device=device)
    logits_LV = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    wide = torch.promote_types(logits_LV.dtype, torch.float32)
    logits_LV = logits_LV.to(wide)
    # Not log_softmax: on CPU in float32 it is biased for large vocabularies (torch 2.13: 5e-6 at 150,000 tokens, where
    # logsumexp is at 4e-8), which alone put SmolLM2's flat gradient 5e-5 away from float64, and 3e-6 without it.
    logprobs = logits_LV.gather(1, ids[1:, None])[:, 0] - torch.logsumexp(logits_LV, dim=-1)
    loss = -(torch.as_tensor(weight[1:], device=device).to(wide) * logprobs).sum()
    loss.backward()
    return loss.item(), logprobs.detach()


def _run_wide_copy(model: nn.Module, items: Sequence[Trajectory], weights: Sequence[np.ndarray]) -> _Run:
    """The flat side of a float32 copy."""
    needed = 4 * (sum(p.numel() for p in model.parameters()) + sum(p.numel() for p in _trained(model).values()))
    free = free_bytes(_device(model))
    if needed > free:
        raise ConfigError(
            f"a float32 copy and its gradient need {needed / 2**30:.1f} GiB, of which {free / 2**30:.1f} are free; "
            "give tolerance= to compare with flat training in the model's own dtype."
        )
    wide = copy.deepcopy(model).float()
    return _run_flat(wide, items, weights)


def _run_tree(engine: TreeEngine, model: nn.Module, forest: Forest, objective: SFT) -> _Run:
    """All trajectories as trees, by the engine."""
    device = _device(model)
    with torch.no_grad():
        logprobs = [each.double().cpu() for each in engine.logprobs(forest)]
    _clear_gradients(model)
    started = _now(device)
    out = engine.step(forest, objective)
    seconds = _now(device) - started
    return _Run(float(out.loss), logprobs, _take_gradients(model), seconds, int(out.num_computed_tokens))


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
        ParameterError(name, norms[name], _ratio(gaps[name], max(norms[name], SMALLEST_SHARE * norm))) for name in norms
    ]
    rows.sort(key=lambda row: math.inf if math.isnan(row.error) else row.error, reverse=True)
    return _Errors(
        loss=_ratio(abs(other.loss - reference.loss), abs(reference.loss)),
        max_logprob=difference.abs().max().item(),
        rms_logprob=difference.square().mean().sqrt().item(),
        gradient=_ratio(math.hypot(*gaps.values()), norm),
        gradient_norm=norm,
        parameters=tuple(rows),
    )


def _limits(dtype: torch.dtype, tolerance: float | None, flat: _Errors | None, loss: float) -> dict[str, float]:
    """What each error may be."""
    if flat is not None:
        # A loss is a mean, so by chance flat training may meet it exactly; its log-probs say what to expect.
        loss_error = max(flat.loss, _ratio(flat.rms_logprob, abs(loss)))
        own = {"loss": loss_error, "rms_logprob": flat.rms_logprob, "gradient": flat.gradient}
        return {name: MAX_TIMES_FLAT * error for name, error in own.items()}
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


def _prefix_keys(token_ids: np.ndarray) -> list[bytes]:
    """For each token a hash of the path to it."""
    state, keys = blake2b(digest_size=16), []
    for token in token_ids.astype("<i4"):
        state.update(token.tobytes())
        keys.append(state.digest())
    return keys


# -- the model as it was found ----------------------------------------------------------------------------------------


@contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; modes, gradients and random generators as they were afterwards."""
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    devices = [_device(model)] if _device(model).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        try:
            model.eval()
            for parameter in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            for module, mode in modes.items():
                module.training = mode


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise ConfigError(f"{type(model).__name__} has no trained parameter; nothing to compare.")
    return found


def _clear_gradients(model: nn.Module) -> None:
    """Zeros that are really in memory, so that neither side is timed while the system hands out pages."""
    for parameter in _trained(model).values():
        parameter.grad = torch.empty_like(parameter).zero_()


def _take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    taken = {}
    for name, parameter in _trained(model).items():
        assert parameter.grad is not None
        taken[name], parameter.grad = parameter.grad, None
    return taken


def _lowest_dtype(model: nn.Module) -> torch.dtype:
    """The least precise floating dtype among the parameters: what limits the numerics."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    lowest = max(found, key=lambda dtype: torch.finfo(dtype).eps)
    if lowest not in TOLERANCE and lowest not in LOW_PRECISION:
        raise ConfigError(f"the model has parameters in {lowest}; verify it in bfloat16 or float32.")
    return lowest


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
