"""Probe of gradients before the first step: every parameter that flat training moves, the tree moves alike.

A backward of a tree of two branches, one of its two rows through the model's own forward, and one of the difference of
the two, each after forwards of its own. In low precision, where single numbers are noise, the whole gradient is
compared, and whether the tree reaches a parameter at all.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.engine.differentiable import restore, tree_values
from treewise.engine.probe import has_experts, own_logprobs, widest_precision
from treewise.engine.scoring import token_reader
from treewise.engine.stirring import adapters_stirred
from treewise.engine.walk import Walk
from treewise.errors import UnsupportedModelError
from treewise.nn.model import SUPPORTED_MODELS, DecoderAndHead
from treewise.planning.planner import plan as make_plan
from treewise.shapes import Int
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

# Largest difference of a parameter's gradient, relative to its own norm and to that of the whole gradient.
_OWN, _WHOLE = 1e-2, 1e-4
_UNREACHED = 1e-6  # of the whole gradient: flat training moves a parameter by more than this
_LOW_PRECISION, _LOW_PRECISION_EXPERTS = 0.2, 0.5  # of the whole gradient
_EXPERTS = ("expert", "moe", "router", "gate")  # in paths of what tokens that are routed elsewhere reach


def probe_gradients(lm: DecoderAndHead, impl: str, token_ids: Int[np.ndarray, " n"]) -> None:
    """Raises if the tree gives a trained parameter another gradient than flat training. Leaves `.grad` as it is.

    token_ids: [n] integers, a few of the user's own tokens. impl: a name of `IMPLEMENTATIONS`.

    Raises:
        UnsupportedModelError: with the first such parameter.
    """
    trained = [(name, each) for name, each in lm.model.named_parameters() if each.requires_grad]
    if not trained:
        return
    ids = np.resize(token_ids, 12)
    rows = [Trajectory(ids[:8]), Trajectory(np.concatenate([ids[:4], ids[8:]]))]
    parameters = [each for _, each in trained]
    with adapters_stirred(lm.model), widest_precision(lm, ids[:8]), _without_checkpointing(lm.model):
        is_mixed = torch.is_autocast_enabled(lm.device.type)
        flat = _flat_loss(lm, rows)
        if not flat.requires_grad:
            return
        norms = [0.0 if grad is None else grad.float().norm().item() for grad in _gradients(flat, parameters)]
        tree = _tree_loss(lm, impl, rows)
        reached = [False] * len(trained)
        if tree.requires_grad:
            reached = [grad is not None for grad in _gradients(tree, parameters)]
        # New forwards: compiled layers overwrite what they saved in their first backward. One set of gradients is held.
        gap = _tree_loss(lm, impl, rows) - _flat_loss(lm, rows)
        gaps = [0.0 if grad is None else grad.float().norm().item() for grad in _gradients(gap, parameters)]
    is_wide = all(each.dtype.itemsize >= 4 for each in lm.model.parameters() if each.is_floating_point())
    names = [name for name, _ in trained]
    _check(lm, names, np.array(norms), np.array(gaps), np.array(reached), is_exact=is_wide and not is_mixed)


def _check(
    lm: DecoderAndHead,
    names: Sequence[str],
    norms: np.ndarray,
    gaps: np.ndarray,
    reached: np.ndarray,
    *,
    is_exact: bool,
) -> None:
    """Compares P parameters: [P] norms of flat gradients, [P] norms of differences, [P] whether the tree reaches."""
    if not np.isfinite(norms).all():
        return  # flat training fails alike; the step reports it with its trees
    whole = float(np.sqrt(np.square(norms).sum()))
    is_routed = np.array([has_experts(lm) and any(word in name for word in _EXPERTS) for name in names])
    is_missed = ~reached & (norms > _UNREACHED * whole) & (is_exact | ~is_routed)
    is_wrong = ~(gaps <= _OWN * norms + _WHOLE * whole) if is_exact else np.zeros(len(names), dtype=bool)
    for index in np.flatnonzero(is_missed | is_wrong)[:1]:
        what = "has no gradient on the tree" if is_missed[index] else f"differs on the tree by {gaps[index]:.3g}"
        raise UnsupportedModelError(
            f"the gradient of {names[index]} {what}, where flat training's has norm {norms[index]:.3g} (whole gradient "
            f"{whole:.3g}; {int((is_missed | is_wrong).sum())} of {len(names)} parameters differ). {SUPPORTED_MODELS}"
        )
    compared = ~is_routed
    gap = float(np.sqrt(np.square(gaps[compared]).sum()))
    limit = (_LOW_PRECISION_EXPERTS if is_routed.any() else _LOW_PRECISION) * whole
    if not is_exact and not gap <= limit:
        raise UnsupportedModelError(
            f"the gradient on the tree differs from flat training's by {gap:.3g} (limit {limit:.3g}), first in "
            f"{names[int(np.argmax(np.where(compared, gaps, 0)))]}. {SUPPORTED_MODELS}"
        )


def _flat_loss(lm: DecoderAndHead, rows: Sequence[Trajectory]) -> torch.Tensor:
    return _loss([own_logprobs(lm, row.token_ids) for row in rows])


def _tree_loss(lm: DecoderAndHead, impl: str, rows: Sequence[Trajectory]) -> torch.Tensor:
    forest = Forest.from_trajectories(rows)
    (values,) = tree_values(lambda: Walk(lm, make_plan(forest), impl), [token_reader(forest)])
    return _loss([each[1:] for each in restore(values["log_probs"], forest)])


def _loss(logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A sum with other weights for each token, so that no two errors cancel."""
    every = torch.cat(list(logprobs))
    return (every * torch.linspace(-1.5, -0.5, len(every), dtype=every.dtype, device=every.device)).sum()


def _gradients(loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> tuple[torch.Tensor | None, ...]:
    """Apart from `.grad`, whose hooks (an optimizer's step in the backward, for one) must not run here."""
    return torch.autograd.grad(loss, parameters, allow_unused=True)


@contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Reentrant checkpoints work with `.backward()` alone, and a dozen tokens need none."""
    checkpointed: list[Any] = [each for each in model.modules() if getattr(each, "gradient_checkpointing", False)]
    for module in checkpointed:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in checkpointed:
            module.gradient_checkpointing = True
