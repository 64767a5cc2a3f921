"""Tree-GRPO's advantage: a rollout against its prompt's rollouts, and against those of its own tree."""

from collections.abc import Hashable, Sequence

import numpy as np

from treewise.advantages.group_tree import GroupTree, group_trees
from treewise.advantages.rollout_table import Credited, Rollouts, credited, read_rollouts
from treewise.errors import ConfigError, DataError, num
from treewise.tree.trajectory import Trajectory


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
    if not epsilon >= 0:
        raise ConfigError(f"epsilon={epsilon} must not be negative.")
    rollouts = read_rollouts(trajectories)
    if tree_of is not None and len(tree_of) != len(rollouts.trajectories):
        raise DataError(
            f"{num(len(tree_of), 'tree')} for {num(len(rollouts.trajectories), 'trajectory', 'trajectories')}; "
            "give one for each."
        )
    if tree_of is None and all(item.draws is not None for item in rollouts.trajectories):
        tree_of = [_first_draw(item) for item in rollouts.trajectories]
    tree_R = _given_trees(rollouts, tree_of) if tree_of is not None else _first_parts(rollouts)
    between = _z_scores(rollouts.rewards, rollouts.group, epsilon)
    within = _z_scores(rollouts.rewards, tree_R, epsilon)
    advantages = (between + within)[rollouts.of_trajectory]
    notes = [f"{num(len(np.unique(tree_R)), 'tree')}."]
    return credited(rollouts, advantages.tolist(), "inter_intra", notes)


def _first_draw(item: Trajectory) -> float:
    assert item.draws is not None
    drawn = item.draws[item.draws >= 0]
    return float(drawn[0]) if len(drawn) else -1.0


def _z_scores(rewards: np.ndarray, key: np.ndarray, epsilon: float) -> np.ndarray:
    """[R] `(r - mean) / (unbiased deviation + epsilon)` among equal keys; exactly 0 where nothing differs."""
    result = np.zeros(len(rewards))
    for each in np.unique(key):
        members = rewards[key == each]
        if np.ptp(members) > 0:
            result[key == each] = (members - members.mean()) / (members.std(ddof=1) + epsilon)
    return result


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
        start = _number_parts(tree, tree_R, start)
    return tree_R


def _number_parts(tree: GroupTree, tree_R: np.ndarray, start: int) -> int:
    counts = tree.counts
    everyone = tree.through[-1]
    tree_R[everyone] = start + np.arange(len(everyone))  # a rollout that ends where others part is a tree of its own
    start += len(everyone)
    tops = [s for s in range(tree.num_segments) if counts[s] < counts[-1] == counts[tree.parent[s]]]
    for segment in reversed(tops):  # rows of one rollout may take several parts: the first one decides
        tree_R[tree.through[segment]] = start
        start += 1
    return start
