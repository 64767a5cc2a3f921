"""Flat training, written as a newcomer would: one trajectory at a time through the model's own forward."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from treewise.tree.trajectory import Trajectory

Gradients = dict[str, torch.Tensor]


def flat_logprobs(model: nn.Module, trajectory: Trajectory) -> torch.Tensor:
    """[length - 1] log-probs of every token but the first, with a graph."""
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits.to(wide), dim=-1).gather(1, ids[0, 1:, None])[:, 0]


def flat_sft(model: nn.Module, trajectories: Sequence[Trajectory]) -> tuple[float, list[torch.Tensor], Gradients]:
    """Loss, log-probs and gradients of the weighted token mean over all trajectories."""
    model.zero_grad()
    total = sum(float(item.loss_weights.sum()) for item in trajectories)
    loss, kept = 0.0, []
    for item in trajectories:
        logprobs = flat_logprobs(model, item)
        weights = torch.tensor(item.loss_weights[1:], dtype=logprobs.dtype)
        share = -(logprobs * weights).sum() / total
        share.backward()
        loss += float(share.detach())
        kept.append(logprobs.detach())
    return loss, kept, gradients_of(model)


def flat_loss(
    model: nn.Module, trajectories: Sequence[Trajectory], loss_of: Callable[[list[torch.Tensor]], torch.Tensor]
) -> tuple[float, Gradients]:
    """Any loss of all trajectories' log-probs, in one graph."""
    model.zero_grad()
    loss = loss_of([flat_logprobs(model, item) for item in trajectories])
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def gradients_of(model: nn.Module) -> Gradients:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def gradient_error(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference of the whole gradient over the norm of the expected one; a missing one counts as zero."""
    difference = norm = 0.0
    for name in found.keys() | expected.keys():
        left, right = found.get(name), expected.get(name)
        left = torch.zeros_like(right) if left is None else left
        right = torch.zeros_like(left) if right is None else right
        difference += float((left.double() - right.double()).square().sum())
        norm += float(right.double().square().sum())
    return (difference / norm) ** 0.5
