"""Advantages on trees, by the rules of the papers. Each group is a tree of its own, so that different prompts under one
system prompt are never compared. The value of a segment says how well the rollouts through it did.

Letters: S segments; *states* as in `group_tree`.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from treewise.advantages.group_tree import GroupTree, exact_mean, group_trees, is_equal, on_segments
from treewise.advantages.rollout_table import (
    Credited,
    Rollouts,
    check_epsilon,
    compared,
    read_rollouts,
    with_advantages,
)
from treewise.errors import ConfigError, DataError, check_choice, num
from treewise.tree.trajectory import Trajectory

# -- Advantages on the tree: at each fork, its children are compared with one another ---------------------------------


def sibling_relative(
    trajectories: Sequence[Trajectory], *, scale: str = "none", epsilon: float = 1e-4, baseline: str = "fork"
) -> Credited:
    """A segment's value minus the value of the fork that it comes from, for every token of the segment.

    The idea is that of tree-structured RL (Tree-GRPO, arXiv 2509.21240; TreeRL, arXiv 2506.11902, whose local
    advantage is this one): a branch is credited with what it changed, and a prefix that all share with nothing. Values
    are means over draws (`group_tree`).

    Where every rollout of the fork goes on through a child (its rows part at a sub-agent call or at a dropped thought),
    the fork is no choice between rollouts: the child keeps the advantage of what is above it. First tokens of several
    trees of one group are compared like the children of a fork. Tokens above any fork get 0.

    scale: `siblings` divides by the unbiased deviation of the rewards that the fork's value is the mean of, plus
        `epsilon`.
    baseline: `fork` subtracts the value of the fork, of which the child is a part: a child that is one of k draws gets
        `1 - 1/k` of what it changed, half at a fork of two. `others` subtracts the mean of the other draws from the
        fork; `elsewhere` the mean reward of all rollouts of the group that do not pass through the child, which has
        less noise. For both, rollouts part where they were drawn apart (`Trajectory.draws`), not where their tokens
        differ. With `weighting="per_rollout"` and rollouts of one length their gradient is unbiased where neither
        tokens nor rewards decide what is drawn next (branching `none`, `random`, `segments`, `turns` at random). Of
        independent rollouts they are `leave_one_out`.

    Raises:
        ConfigError: an unknown `scale` or `baseline`, or a negative epsilon.
        DataError: see `read_rollouts`.
    """
    check_choice("scale", scale, ("none", "siblings"))
    check_choice("baseline", baseline, ("fork", "others", "elsewhere"))
    check_epsilon(epsilon)
    rollouts = read_rollouts(trajectories)
    num_forks = num_equal = 0

    def values_of(tree: GroupTree) -> np.ndarray:
        nonlocal num_forks, num_equal
        value, counts, children = tree.means(tree.rewards), tree.counts, tree.children
        forks = np.unique(tree.parent[counts < counts[tree.parent]])
        members = {fork: np.append(value[children[fork]], tree.rewards[tree.ending_at(fork)]) for fork in forks}
        deviations = tree.deviations(tree.rewards) if scale == "siblings" else None
        num_forks += len(forks)
        num_equal += sum(map(is_equal, members.values()))
        result = np.zeros(len(value))
        is_flat = is_equal(tree.rewards[tree.through[-1]])  # then all is exactly 0, not what rounding leaves of it
        for segment, above in enumerate(tree.parent[:-1]):  # parents come first in depth-first order
            if counts[segment] == counts[above]:
                result[segment] = result[above]
                continue
            if not (is_equal(members[above]) if baseline == "fork" else is_flat):
                result[segment] = value[segment] - _baseline(tree, value, segment, baseline)
            if deviations is not None:
                result[segment] /= deviations[above] + epsilon
        return result[:-1]

    advantages = on_segments(rollouts, values_of, of_draws=baseline != "fork")
    notes = [f"{num_forks:,} forks at which rollouts part; {num_equal:,} of them with children of equal value."]
    return with_advantages(rollouts, advantages, f"sibling_relative(scale={scale!r}, baseline={baseline!r})", notes)


def _baseline(tree: GroupTree, value: np.ndarray, segment: int, baseline: str) -> float:
    """What `sibling_relative` subtracts from a segment's value."""
    above = tree.parent[segment]
    if baseline == "fork":
        return float(value[above])
    if baseline == "others":
        others = [child for child in tree.children[above] if child != segment]
        return exact_mean(value[others], tree.num_draws[others])
    return exact_mean(tree.rewards[np.setdiff1d(tree.through[-1], tree.through[segment])])


def segment_values(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The value of each token's segment, per trajectory ([length] float64): a Monte Carlo critic of the tree.

    Each group is a tree of its own.
    """
    return on_segments(read_rollouts(trajectories), lambda tree: tree.means(tree.rewards)[:-1])


# -- Tree-GRPO: a rollout against its prompt's rollouts, and against those of its own tree ----------------------------


def inter_intra(
    trajectories: Sequence[Trajectory], tree_of: Sequence[Hashable] | None = None, *, epsilon: float = 1e-4
) -> Credited:
    """`z of the reward in the group + z of the reward in its tree`, for all tokens of a rollout; z as in GRPO.

    Source: Tree-GRPO (arXiv 2509.21240, intra-tree and inter-tree advantages). docs/tree-credit.md says where the
    released code differs.

    tree_of: for each trajectory the tree that it was sampled in; where not given, the first draw of its `draws`; where
        it has none, the trees of a group are what its rollouts first part into, which is the same unless two trees
        begin alike.

    Raises:
        ConfigError: a negative epsilon.
        DataError: see `read_rollouts`; another number of trees than trajectories.
    """
    check_epsilon(epsilon)
    rollouts = read_rollouts(trajectories)
    if tree_of is not None and len(tree_of) != len(rollouts.trajectories):
        raise DataError(
            f"{num(len(tree_of), 'tree')} for {num(len(rollouts.trajectories), 'trajectory', 'trajectories')}; "
            "give one for each."
        )
    draws = [item.draws for item in rollouts.trajectories if item.draws is not None]
    if tree_of is None and len(draws) == len(rollouts.trajectories):
        tree_of = [float(next(iter(own[own >= 0]), -1.0)) for own in draws]
    tree_R = _given_trees(rollouts, tree_of) if tree_of is not None else _first_parts(rollouts)
    between = compared(rollouts.rewards, rollouts.group, epsilon)
    within = compared(rollouts.rewards, np.unique(tree_R, return_inverse=True)[1], epsilon)
    advantages = (between + within)[rollouts.of_trajectory]
    notes = [f"{num(len(np.unique(tree_R)), 'tree')}."]
    return with_advantages(rollouts, advantages.tolist(), "inter_intra", notes)


def _given_trees(rollouts: Rollouts, tree_of: Sequence[Hashable]) -> np.ndarray:
    numbers: dict[tuple[int, Hashable], int] = {}
    tree_R = np.zeros(len(rollouts.rewards), dtype=np.int64)
    for rollout, tree in reversed(list(zip(rollouts.of_trajectory, tree_of, strict=True))):  # its first row decides
        tree_R[rollout] = numbers.setdefault((int(rollouts.group[rollout]), tree), len(numbers))
    return tree_R


def _first_parts(rollouts: Rollouts) -> np.ndarray:
    """[R] the part of its group's tree that each rollout takes where rollouts first part."""
    tree_R = np.zeros(len(rollouts.rewards), dtype=np.int64)
    start = 0
    for tree in group_trees(rollouts):
        counts, everyone = tree.counts, tree.through[-1]
        # A rollout that ends where others part is a tree of its own.
        tree_R[everyone] = start + np.arange(len(everyone))
        start += len(everyone)
        tops = [s for s in range(tree.num_segments) if counts[s] < counts[-1] == counts[tree.parent[s]]]
        for segment in reversed(tops):  # rows of one rollout may take several parts: the first one decides
            tree_R[tree.through[segment]] = start
            start += 1
    return tree_R


# -- TreePO's advantage: a rollout against every group of rollouts that it shares a prefix with -----------------------


def tree_path_mean(
    trajectories: Sequence[Trajectory], *, average: str = "equal", scale: str = "none", epsilon: float = 1e-8
) -> Credited:
    """`reward - mean of the group`, averaged over the groups on a rollout's path: all rollouts of the prompt, then
    those that share each longer prefix, down to the last shared one. One number for all tokens of a rollout. A group's
    mean is over its rollouts, which are what is compared; it is no value of a state (`group_tree`).

    Source: TreePO (arXiv 2508.17445, tree-based advantage estimation); released code: `core_algos.py`,
    `compute_tree_reinforce_plus_plus_baseline_outcome_advantage`. docs/tree-credit.md says where that differs.

    average: `equal`, or `size`: each group counts by its number of rollouts.
    scale: `batch` whitens over the trained tokens of all trajectories: subtracts their mean, divides by their deviation
        plus `epsilon`, as the released code does.

    Raises:
        ConfigError: an unknown name, or a negative epsilon.
        DataError: see `read_rollouts`.
    """
    check_choice("average", average, ("equal", "size"))
    check_choice("scale", scale, ("none", "batch"))
    check_epsilon(epsilon)
    rollouts = read_rollouts(trajectories)
    total_R, weight_R = np.zeros(len(rollouts.rewards)), np.zeros(len(rollouts.rewards))
    for tree in group_trees(rollouts):
        counts = tree.counts
        is_group = (counts > 1) & (counts < counts[tree.parent])
        is_group[-1] = counts[-1] > 1
        groups = {tuple(tree.through[state]): state for state in np.flatnonzero(is_group)}  # equal ones count once
        for state in groups.values():
            members, weight = tree.through[state], counts[state] if average == "size" else 1
            total_R[members] += weight * (rollouts.rewards[members] - exact_mean(rollouts.rewards[members]))
            weight_R[members] += weight
    advantages = (total_R / np.maximum(weight_R, 1))[rollouts.of_trajectory]
    if scale == "batch":
        trained_N = [np.count_nonzero(item.loss_weights) for item in rollouts.trajectories]
        mean = np.average(advantages, weights=trained_N)
        deviation = np.sqrt(np.average((advantages - mean) ** 2, weights=trained_N))
        advantages = (advantages - mean) / (deviation + epsilon) if deviation else np.zeros_like(advantages)
    return with_advantages(rollouts, advantages.tolist(), f"tree_path_mean(average={average!r}, scale={scale!r})")


# -- TreeRL: what a segment changed, against the whole tree and against the fork before it ----------------------------


def treerl(
    trajectories: Sequence[Trajectory], *, use_global: bool = True, use_local: bool = True, damp: bool = True
) -> Credited:
    """`(V(s) - V(root) + V(s) - V(fork)) / sqrt(n)` for the tokens of segment s: V is the mean over draws
    (`group_tree`), n the number of rollouts through it, `root` all of the group, `fork` where its rollouts parted from
    others.

    Source: TreeRL (arXiv 2506.11902, process supervision: global and local advantage, divided by the root of the number
    of leaves, because a shared token is trained once for each). Released code: docs/tree-credit.md.

    use_global, use_local, damp: leave out one of the two terms, or the root of n.

    Raises:
        DataError: see `read_rollouts`.
    """
    rollouts = read_rollouts(trajectories)

    def values_of(tree: GroupTree) -> np.ndarray:
        value = tree.means(rollouts.rewards)
        change = use_global * (value - value[-1]) + use_local * (value - value[tree.fork])
        return (change / np.sqrt(tree.counts) if damp else change)[:-1]

    method = f"treerl(use_global={use_global}, use_local={use_local}, damp={damp})"
    return with_advantages(rollouts, on_segments(rollouts, values_of), method)


# -- SPO: the change of value that a segment brought, on tokens that were a decision ----------------------------------


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
        return with_advantages(read_rollouts(items), advantages, method, report.notes)
    num_masked = num_trained = 0
    for index, item in enumerate(items):
        location = item.source or f"trajectory {index}"
        logprobs = _logprobs_of(item, f"{location}: the probability mask", "; or mask_above=None")
        is_sure = logprobs >= np.log(mask_above)
        advantages[index][is_sure] = 0.0
        num_masked += int((is_sure & (item.loss_weights > 0)).sum())
        num_trained += item.num_trained_tokens
    notes = [*report.notes, f"{num_masked:,} of {num_trained:,} trained tokens are masked."]
    return with_advantages(read_rollouts(items), advantages, method, notes)


# -- AT2PO's advantage: a segment's own value, of rewards that were normalised in the group ---------------------------


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
    check_choice("weights", weights, ("equal", "entropy"))
    check_epsilon(epsilon)
    rollouts = read_rollouts(trajectories)

    def values_of(tree: GroupTree) -> np.ndarray:
        own = rollouts.rewards[tree.through[-1]]
        values_R = np.zeros(len(rollouts.rewards))
        if np.ptp(own) > 0:
            values_R[tree.through[-1]] = (own - own.mean()) / (own.std() + epsilon)
        by_entropy = tree.weights_by_draws(np.exp(_surprisal(tree))) if weights == "entropy" else None
        return tree.means(values_R, by_entropy)[:-1]

    return with_advantages(rollouts, on_segments(rollouts, values_of), f"node_value(weights={weights!r})")


def _surprisal(tree: GroupTree) -> np.ndarray:
    """[S] mean `-log p` over trained tokens, from the begin of each segment until its rollouts part; 0 without any."""
    forest = tree.forest
    flat = [_logprobs_of(item, f"{item.source or 'a trajectory'}: weights='entropy'") for item in forest.trajectories]
    is_trained = forest.flat_stream("loss_weights") > 0
    token, first = np.unique(forest.path_index[is_trained], return_index=True)
    segment = forest.segment_of_token[token]
    surprisal = -np.concatenate(flat)[is_trained][first]
    total = np.bincount(segment, weights=surprisal, minlength=tree.num_segments)
    count = np.bincount(segment, minlength=tree.num_segments)
    for child in range(tree.num_segments - 1, -1, -1):
        above = tree.parent[child]
        if above < tree.num_segments and len(tree.through[child]) == len(tree.through[above]):
            total[above] += total[child]
            count[above] += count[child]
    return total / np.maximum(count, 1)


def _logprobs_of(item: Trajectory, what: str, otherwise: str = "") -> np.ndarray:
    """[length] float64, of the policy before the update, or of the sampler. Raises `DataError` without either."""
    logprobs = item.sampler_logprobs if item.old_logprobs is None else item.old_logprobs
    if logprobs is None:
        raise DataError(f"{what} needs old_logprobs or sampler_logprobs{otherwise}.")
    return logprobs.astype(np.float64)
