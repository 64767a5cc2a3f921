"""TreeRL's process reward: what a segment changed, against the whole tree and against the fork that it comes from."""

from collections.abc import Sequence

import numpy as np

from treewise.advantages.group_tree import GroupTree, on_segments
from treewise.advantages.rollout_table import Credited, credited, read_rollouts
from treewise.tree.trajectory import Trajectory


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
    return credited(rollouts, on_segments(rollouts, values_of), method)
