"""AT2PO's advantage: a segment's own value, of rewards that were normalised in the group."""

from collections.abc import Sequence

import numpy as np

from treewise.advantages.group_tree import GroupTree, on_segments
from treewise.advantages.rollout_table import Credited, credited, read_rollouts
from treewise.errors import ConfigError, DataError
from treewise.tree.trajectory import Trajectory

WEIGHTS = ("equal", "entropy")


def node_value(trajectories: Sequence[Trajectory], *, weights: str = "equal", epsilon: float = 1e-6) -> Credited:
    """`V(s)` for the tokens of segment s, from the leaves up: rewards as `(r - mean) / (deviation + epsilon)` in the
    group (deviation of n, not n - 1), then the mean over draws (`group_tree`).

    Source: AT2PO (arXiv 2601.04767, turn-wise credit assignment). Released code: docs/tree-credit.md.

    weights: `entropy` weighs draws by the softmax of the mean `-log p` of what the policy wrote in them; by
        `old_logprobs`, or `sampler_logprobs` where there are none.

    Raises:
        ConfigError: unknown weights, or a negative epsilon.
        DataError: see `read_rollouts`; `entropy` and a trajectory without log-probs.
    """
    if weights not in WEIGHTS or not epsilon >= 0:
        raise ConfigError(f"weights={weights!r} must be one of {', '.join(WEIGHTS)}, epsilon={epsilon} not negative.")
    rollouts = read_rollouts(trajectories)

    def values_of(tree: GroupTree) -> np.ndarray:
        own = rollouts.rewards[tree.through[-1]]
        values_R = np.zeros(len(rollouts.rewards))
        if np.ptp(own) > 0:
            values_R[tree.through[-1]] = (own - own.mean()) / (own.std() + epsilon)
        by_entropy = tree.weights_by_draws(np.exp(_surprisal(tree))) if weights == "entropy" else None
        return tree.means(values_R, by_entropy)[:-1]

    return credited(rollouts, on_segments(rollouts, values_of), f"node_value(weights={weights!r})")


def _surprisal(tree: GroupTree) -> np.ndarray:
    """[S] mean `-log p` over trained tokens, from the begin of each segment until its rollouts part; 0 without any."""
    forest = tree.forest
    flat = []
    for item in forest.trajectories:
        logprobs = item.sampler_logprobs if item.old_logprobs is None else item.old_logprobs
        if logprobs is None:
            location = item.source or "a trajectory"
            raise DataError(f"{location}: weights='entropy' needs old_logprobs or sampler_logprobs.")
        flat.append(logprobs)
    is_trained = forest.flat_stream("loss_weights") > 0
    token, first = np.unique(forest.path_index[is_trained], return_index=True)
    segment = forest.segment_of_token[token]
    surprisal = -np.concatenate(flat).astype(np.float64)[is_trained][first]
    total = np.bincount(segment, weights=surprisal, minlength=tree.num_segments)
    count = np.bincount(segment, minlength=tree.num_segments)
    for child in range(tree.num_segments - 1, -1, -1):
        above = tree.parent[child]
        if above < tree.num_segments and len(tree.through[child]) == len(tree.through[above]):
            total[above] += total[child]
            count[above] += count[child]
    return total / np.maximum(count, 1)
