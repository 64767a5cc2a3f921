"""Which stepper samples from a model: the fastest whose logits equal a plain forward's, measured on the model."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from treewise.errors import UnsupportedModelError
from treewise.rl.samplers import shared_prefix
from treewise.rl.samplers.steppers import CopiedCache, Recompute, Stepper, cache_argument, is_attention_only

logger = logging.getLogger(__name__)
NUM_STEPS = 3
TOLERANCE = 1e-3  # of the largest logit, in float32; caches order sums otherwise than a plain forward
TOLERANCE_HALF = 5e-2
STEPPERS: dict[str, Any] = {
    "shared_prefix": shared_prefix.SharedPrefix,
    "copied_cache": CopiedCache,
    "recompute": Recompute,
}


def choose_stepper(model: nn.Module, method: str = "auto", token_ids: Sequence[int] = ()) -> type[Stepper]:
    """The class to sample with.

    Parameters:
        token_ids: ids that the model has seen; on others, two correct computations in bfloat16 may differ widely.

    Raises:
        UnsupportedModelError: the method that was asked for does not give the model's logits.
    """
    reasons: list[str] = []
    for name in STEPPERS if method == "auto" else [method]:
        reason = why_not(model, name, token_ids)
        if reason is None:
            skipped = f" ({'; '.join(reasons)})" if reasons else ""
            logger.info("sampling from %s with %s%s", type(model).__name__, name, skipped)
            return STEPPERS[name]
        reasons.append(f"{name}: {reason}")
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot be sampled from. {'; '.join(reasons)}. Use method='recompute'."
    )


def why_not(model: nn.Module, name: str, token_ids: Sequence[int] = ()) -> str | None:
    """The reason why a model cannot be sampled from in this way; None where it can."""
    if name == "recompute":
        return None
    if cache_argument(model) is None:
        return "its forward takes no cache"
    try:
        if name == "shared_prefix" and not is_attention_only(model):
            return "it has layers with a recurrent state"
        stepper = STEPPERS[name](model)
        gap, scale = _difference(stepper, Recompute(model), model, token_ids)
    except Exception as error:  # models are programs of their own; the next way is tried, and the reason logged
        return f"{type(error).__name__}: {error}"
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    limit = (TOLERANCE_HALF if half else TOLERANCE) * scale
    if not gap <= limit:
        return f"its logits differ by {gap:.2g} where {limit:.2g} is allowed"
    if name == "shared_prefix":
        return _other_windows(stepper, model)
    return None


def _other_windows(stepper: Any, model: nn.Module) -> str | None:
    """A window longer than the short rows of the comparison must be the one that attention is asked for."""
    for layer, window in shared_prefix.expected_windows(model).items():
        seen = stepper.context.windows.get(layer)
        if seen != window:
            return f"layer {layer} has window {window} in its cache and {seen} in its attention"
    return None


def _difference(
    stepper: Stepper, reference: Stepper, model: nn.Module, token_ids: Sequence[int]
) -> tuple[float, float]:
    """Largest difference of logits over a few steps of two groups, and the largest logit."""
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    draw = torch.Generator().manual_seed(0)
    num = 6 + 4 * NUM_STEPS
    ids = [*token_ids[:num], *torch.randint(0, vocabulary, (num,), generator=draw).tolist()][:num]
    short = 6 if stepper.needs_equal_lengths else 4
    prefixes = [tuple(ids[:6]), tuple([*ids[:3], *ids[4:7]][:short])]
    counts = [2, 2]
    gap = scale = 0.0
    outs = [each.start(prefixes, counts, NUM_STEPS) for each in (stepper, reference)]
    for step in range(NUM_STEPS + 1):
        gap = max(gap, float((outs[0].float() - outs[1].float()).abs().max()))
        scale = max(scale, float(outs[1].float().abs().max()))
        if step == NUM_STEPS:
            break
        rows = [1, 2] if step else [0, 1, 2, 3]
        if step == 1:
            for each in (stepper, reference):
                each.keep(rows)
        tokens = torch.tensor(ids[6 + 4 * step :][: len(rows)], device=outs[0].device)
        outs = [each.step(tokens) for each in (stepper, reference)]
    return gap if gap == gap else float("inf"), scale
