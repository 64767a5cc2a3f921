"""SPO's advantage: the change of value that a segment brought, on the tokens that were a decision."""

from collections.abc import Sequence

import numpy as np

from treewise.advantages.rollout_table import Credited, credited, read_rollouts
from treewise.advantages.siblings import sibling_relative
from treewise.errors import ConfigError, DataError
from treewise.tree.trajectory import Trajectory


def value_steps(
    trajectories: Sequence[Trajectory], *, mask_above: float | None = 0.9, scale: str = "none", epsilon: float = 1e-8
) -> Credited:
    """`V(child) - V(parent)` (`sibling_relative`), and 0 on tokens that the policy was sure of.

    Source: SPO-tree (arXiv 2505.23564, tree-based segment advantages, probability mask). docs/tree-credit.md says where
    the released code differs.

    mask_above: tokens of at least this probability get advantage 0; by `old_logprobs`, or `sampler_logprobs` where
        there are none. None: no mask, and no log-probs needed.
    scale: as of `sibling_relative`.

    Raises:
        ConfigError: a probability outside 0..1, above 0; see `sibling_relative`.
        DataError: a trajectory without log-probs; see `read_rollouts`.
    """
    if mask_above is not None and not 0 < mask_above <= 1:
        raise ConfigError(f"mask_above={mask_above} must lie in 0..1, above 0; None for no mask.")
    items, report = sibling_relative(trajectories, scale=scale, epsilon=epsilon)
    method = f"value_steps(mask_above={mask_above}, scale={scale!r})"
    advantages = [np.asarray(item.advantages, dtype=np.float64) for item in items]
    if mask_above is None:
        return credited(read_rollouts(items), advantages, method, report.notes)
    num_masked = num_trained = 0
    for index, item in enumerate(items):
        logprobs = item.sampler_logprobs if item.old_logprobs is None else item.old_logprobs
        if logprobs is None:
            location = item.source or f"trajectory {index}"
            raise DataError(
                f"{location}: the probability mask needs old_logprobs or sampler_logprobs; or mask_above=None."
            )
        is_sure = logprobs.astype(np.float64) >= np.log(mask_above)
        advantages[index][is_sure] = 0.0
        num_masked += int((is_sure & (item.loss_weights > 0)).sum())
        num_trained += item.num_trained_tokens
    notes = [*report.notes, f"{num_masked:,} of {num_trained:,} trained tokens are masked."]
    return credited(read_rollouts(items), advantages, method, notes)
