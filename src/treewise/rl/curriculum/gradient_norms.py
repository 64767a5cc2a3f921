"""The gradient of each tree on its own, as a norm: what angles claim to predict."""

import math
from collections.abc import Sequence

import torch

from treewise.engine.engine import TreeEngine
from treewise.nn.gradients import clear_gradients, gradients_restored
from treewise.objectives import Objective
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


def gradient_norms(
    engine: TreeEngine, trees: Sequence[Sequence[Trajectory]], objective: Objective | None
) -> list[float]:
    """The norm over all trained parameters of each tree's own gradient; earlier gradients are restored.

    objective: None for SFT; of a policy gradient the trees must hold their advantages.
    """
    model, norms = engine.model, []
    was_training = model.training
    model.eval()
    try:
        for tree in trees:
            with gradients_restored(model):
                engine.step(Forest.from_trajectories(list(tree)), objective)
                norms.append(_norm(model))
                clear_gradients(model.parameters())
    finally:
        model.train(was_training)
    return norms


def _norm(model: torch.nn.Module) -> float:
    squares = [float(each.grad.double().square().sum()) for each in model.parameters() if each.grad is not None]
    return math.sqrt(math.fsum(squares))
