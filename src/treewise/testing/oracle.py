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
    """Loss, log-probs ([length - 1] each) and gradients of the weighted token mean over all trajectories."""
    model.zero_grad()
    weights_N = [np.asarray(item.loss_weights) for item in trajectories]
    total = sum(float(weights.sum()) for weights in weights_N)
    loss, logprobs_N = 0.0, []
    for item, weights in zip(trajectories, weights_N, strict=True):
        logprobs = flat_logprobs(model, item)
        loss_part = -(logprobs * torch.tensor(weights[1:], dtype=logprobs.dtype)).sum() / total
        loss_part.backward()
        loss += float(loss_part.detach())
        logprobs_N.append(logprobs.detach())
    return loss, logprobs_N, gradients_of(model)


def flat_loss(
    model: nn.Module, trajectories: Sequence[Trajectory], loss_of: Callable[[list[torch.Tensor]], torch.Tensor]
) -> tuple[float, Gradients]:
    """Any loss of all trajectories' log-probs, in one graph."""
    model.zero_grad()
    loss = loss_of([flat_logprobs(model, item) for item in trajectories])
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def gradients_of(model: nn.Module) -> Gradients:
    """Copies of the gradients that a model has, by the name of the parameter."""
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def gradient_error(computed: Gradients, expected: Gradients) -> float:
    """Norm of the difference of the whole gradient over the norm of the expected one; a missing one counts as zero."""
    difference = norm = 0.0
    for name in computed.keys() | expected.keys():
        left, right = computed.get(name), expected.get(name)
        zero = torch.zeros_like(expected[name] if left is None else left)
        left, right = zero if left is None else left, zero if right is None else right
        difference += float((left.double() - right.double()).square().sum())
        norm += float(right.double().square().sum())
    return (difference / norm) ** 0.5
