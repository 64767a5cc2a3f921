"""Advantages on the tree: at each fork, its children are compared with one another.

Each group is a tree of its own, so that different prompts under one system prompt are never compared. The value of a
segment says how well the rollouts through it did; a child's tokens get the value of the child minus that of the fork.

Letters: S segments; *states* as in `group_tree`.
"""

from collections.abc import Sequence

import numpy as np

from treewise.advantages.group_tree import GroupTree, is_equal, on_segments
from treewise.advantages.rollout_table import Credited, credited, read_rollouts
from treewise.errors import ConfigError, check_choice
from treewise.tree.trajectory import Trajectory

SCALES = ("none", "siblings")


def sibling_relative(trajectories: Sequence[Trajectory], *, scale: str = "none", epsilon: float = 1e-4) -> Credited:
    """A segment's value minus the value of the fork that it comes from, for every token of the segment.

    The idea is that of tree-structured RL (Tree-GRPO, arXiv 2509.21240; TreeRL, arXiv 2506.11902, whose local
    advantage is this one): a branch is credited with what it changed, and a prefix that all share with nothing. Values
    are means over draws (`group_tree`).

    Where every rollout of the fork goes on through a child (its rows part at a sub-agent call or at a dropped thought),
    the fork is no choice between rollouts: the child keeps the advantage of what is above it. First tokens of several
    trees of one group are compared like the children of a fork. Tokens above any fork get 0.

    scale: `siblings` divides by the unbiased deviation of the rewards that the fork's value is the mean of, plus
        `epsilon`.

    Raises:
        ConfigError: an unknown `scale`, or a negative epsilon.
        DataError: see `read_rollouts`.
    """
    check_choice("scale", scale, SCALES)
    if not epsilon >= 0:
        raise ConfigError(f"epsilon={epsilon} must not be negative.")
    rollouts = read_rollouts(trajectories)
    num_forks = num_equal = 0

    def values_of(tree: GroupTree) -> np.ndarray:
        nonlocal num_forks, num_equal
        value, counts = tree.means(tree.rewards), tree.counts
        forks = np.unique(tree.parent[counts < counts[tree.parent]])
        members = {fork: np.append(value[tree.children[fork]], tree.rewards[tree.ending_at(fork)]) for fork in forks}
        deviations = tree.deviations(tree.rewards) if scale == "siblings" else None
        num_forks += len(forks)
        num_equal += sum(map(is_equal, members.values()))
        result = np.zeros(len(value))
        for segment, above in enumerate(tree.parent[:-1]):  # parents come first in depth-first order
            if counts[segment] == counts[above]:
                result[segment] = result[above]
            elif not is_equal(members[above]):  # otherwise exactly 0, not what rounding leaves of it
                result[segment] = value[segment] - value[above]
                if deviations is not None:
                    result[segment] /= deviations[above] + epsilon
        return result[:-1]

    advantages = on_segments(rollouts, values_of)
    notes = [f"{num_forks:,} forks at which rollouts part; {num_equal:,} of them with children of equal value."]
    return credited(rollouts, advantages, f"sibling_relative(scale={scale!r})", notes)


def segment_values(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The value of each token's segment, per trajectory ([length] float64): a Monte Carlo critic of the tree.

    Each group is a tree of its own.
    """
    return on_segments(read_rollouts(trajectories), lambda tree: tree.means(tree.rewards)[:-1])
