"""What curricula measure on a model: angle concentrations of prompts (GAIN-RL, 2506.02281), and what these claim to
predict: the norm of each tree's own gradient.

Angles come from the hidden rows of one pass of the engine over the tree of all prompts.

For a prompt of m tokens whose first n are the prefix that all prompts share (system prompt, examples),

    intra = 1 / (m - n)^2      sum over i, j > n        cos(x_i, x_j)
    inter = 1 / ((m - n) n)    sum over i > n, j <= n   cos(x_i, x_j)

over final hidden rows x. Sums of cosines are products of sums of unit rows, so both are linear in the tokens; and a
shared prefix is computed once, by the tree. The released code slices rows twice where it means rows and columns, so its
terms are neither of these, and gives NaN for a question shorter than its fixed prefix; here the prefix is what the
prompts share, and a row without a direction is an error.

Letters: N prompts, S segments, T tokens of a micro-batch, M model width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treewise.engine.engine import TreeEngine
from treewise.errors import DataError
from treewise.nn.gradients import clear_gradients, gradients_restored
from treewise.nn.guest import MicroBatchOutput
from treewise.nn.platform.tensors import to_device
from treewise.objectives import Objective
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import common_prefix
from treewise.tree.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Angles:
    """intra, inter: [N] float64, -1..1; inter is 0 where no prefix is shared. num_shared: n, its tokens."""

    intra: np.ndarray
    inter: np.ndarray
    num_shared: int

    @property
    def total(self) -> np.ndarray:
        """[N] float64, what the paper ranks by: intra + inter."""
        total: np.ndarray = self.intra + self.inter
        return total


def num_shared_tokens(prompts: Sequence[np.ndarray]) -> int:
    """Tokens that all prompts begin with, leaving each at least one of its own."""
    rows = sorted(np.asarray(prompt).tolist() for prompt in prompts)  # of all, the first and the last share the fewest
    return min(common_prefix(np.array(rows[0]), np.array(rows[-1])), min(map(len, rows)) - 1)


def angles_of(engine: TreeEngine, prompts: Sequence[Any], num_shared: int | None = None) -> Angles:
    """Angle concentration of each prompt under the engine's model; no gradients, its mode is kept.

    Parameters:
        prompts: token ids of each.
        num_shared: n where it is known from a larger pool; None: of these prompts.

    Raises:
        DataError: a hidden row that is not finite or zero.
    """
    ids = [np.asarray(prompt, dtype=np.int32).reshape(-1) for prompt in prompts]
    n = num_shared_tokens(ids)
    n = n if num_shared is None else min(n, num_shared)
    forest = Forest.from_trajectories([Trajectory(prompt) for prompt in ids])
    shared, own = _sums_of_unit_rows(engine, forest, n)
    sizes = forest.path_lengths - n
    intra = (own**2).sum(-1) / sizes**2
    inter = own @ shared / (sizes * n) if n else np.zeros(len(ids))
    return Angles(intra, inter, n)


def _sums_of_unit_rows(engine: TreeEngine, forest: Forest, num_shared: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the unit rows of the shared prefix, [M] float64, and of each prompt's own tokens, [N, M] float64."""
    segment_T = np.where(forest.depth < num_shared, 0, forest.segment_of_token + 1)
    num_segments = len(forest.segments.start)
    sums: list[torch.Tensor] = []

    def add(output: MicroBatchOutput) -> None:
        rows = output.hidden.double()
        norms = rows.norm(dim=-1, keepdim=True)
        if not bool(((norms > 0) & norms.isfinite()).all()):
            raise DataError("a hidden row is zero or not finite, so it has no direction; angles cannot be computed.")
        if not sums:
            sums.append(rows.new_zeros(num_segments + 1, rows.shape[-1]))
        index_T = to_device(segment_T[output.positions], rows.device, torch.long)
        sums[0].index_add_(0, index_T, rows / norms)

    was_training = engine.model.training
    engine.model.eval()
    try:
        with torch.no_grad():
            engine.new_walk(engine.plan(forest)).visit(add)
    finally:
        engine.model.train(was_training)
    sums_S = sums[0].cpu().numpy()
    totals = sums_S[1:]
    for segment, parent in enumerate(forest.segments.parent.tolist()):  # parents come first
        if parent >= 0:
            totals[segment] += totals[parent]
    return sums_S[0], totals[forest.segments.end_segment]


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
                grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                norms.append(math.sqrt(math.fsum(float(grad.double().square().sum()) for grad in grads)))
                clear_gradients(model.parameters())
    finally:
        model.train(was_training)
    return norms
