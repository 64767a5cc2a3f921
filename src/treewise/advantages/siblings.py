"""Advantages on the tree: at each fork, its children are compared with one another.

Each group is a tree of its own, so that different prompts under one system prompt are never compared. The value of a
segment says how well the rollouts through it did; a child's tokens get the value of the child minus that of the fork.

Letters: S segments, R rollouts, F flat tokens.
"""

from collections.abc import Sequence

import numpy as np

from treewise.advantages.rollout_table import Credited, Rollouts, credited, read_rollouts
from treewise.errors import ConfigError
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

VALUES = ("rollouts", "children")
SCALES = ("none", "siblings")


def sibling_relative(
    trajectories: Sequence[Trajectory], *, values: str = "rollouts", scale: str = "none", epsilon: float = 1e-4
) -> Credited:
    """A segment's value minus the value of the fork that it comes from, for every token of the segment.

    The idea is that of tree-structured RL (Tree-GRPO, arXiv 2509.21240; TreeRL, arXiv 2506.11902, whose local
    advantage is this one): a branch is credited with what it changed, and a prefix that all share with nothing.

    Where every rollout of the fork goes on through a child (its rows part at a sub-agent call or at a dropped thought),
    the fork is no choice between rollouts: the child keeps the advantage of what is above it. First tokens of several
    trees of one group are compared like the children of a fork. Tokens above any fork get 0.

    values: `rollouts`, a segment's value is the mean reward of the rollouts through it; `children`, the mean over its
        children's values, so that a child counts once however often it was sampled (a rollout that ends at a fork is
        a child; several that end there are one).
    scale: `siblings` divides by the unbiased deviation of what the fork's value is the mean of, plus `epsilon`.

    Raises:
        ConfigError: an unknown `values` or `scale`, or a negative epsilon.
        DataError: see `read_rollouts`.
    """
    if scale not in SCALES:
        raise ConfigError(f"scale={scale!r} is unknown; choose one of {', '.join(SCALES)}.")
    if not epsilon >= 0:
        raise ConfigError(f"epsilon={epsilon} must not be negative.")
    rollouts = read_rollouts(trajectories)
    advantages: list[np.ndarray] = [np.zeros(0)] * len(rollouts.trajectories)
    num_forks = num_equal = 0
    group_N = rollouts.group[rollouts.of_trajectory]
    for group in range(len(rollouts.group_names)):
        rows = np.flatnonzero(group_N == group)
        forest = Forest.from_trajectories([rollouts.trajectories[row] for row in rows])
        tree = _Tree(forest, rollouts, rows, values)
        advantages_S = tree.compared(scale, epsilon)
        for row, path in zip(rows, forest.paths, strict=True):
            advantages[row] = advantages_S[forest.segment_of_token[path]]
        num_forks += tree.num_choices
        num_equal += tree.num_equal_choices
    notes = [f"{num_forks:,} forks at which rollouts part; {num_equal:,} of them with children of equal value."]
    return credited(rollouts, advantages, f"sibling_relative(values={values!r}, scale={scale!r})", notes)


def segment_values(trajectories: Sequence[Trajectory], values: str = "rollouts") -> list[np.ndarray]:
    """The value of each token's segment, per trajectory ([length] float64): a Monte Carlo critic of the tree.

    `values` as in `sibling_relative`; each group is a tree of its own.
    """
    rollouts = read_rollouts(trajectories)
    result: list[np.ndarray] = [np.zeros(0)] * len(rollouts.trajectories)
    group_N = rollouts.group[rollouts.of_trajectory]
    for group in range(len(rollouts.group_names)):
        rows = np.flatnonzero(group_N == group)
        forest = Forest.from_trajectories([rollouts.trajectories[row] for row in rows])
        tree = _Tree(forest, rollouts, rows, values)
        for row, path in zip(rows, forest.paths, strict=True):
            result[row] = tree.value[forest.segment_of_token[path]]
    return result


class _Tree:
    """One group's tree: segments 0..S-1 below a virtual root S, with the rollouts through each."""

    def __init__(self, forest: Forest, rollouts: Rollouts, rows: np.ndarray, values: str) -> None:
        if values not in VALUES:
            raise ConfigError(f"values={values!r} is unknown; choose one of {', '.join(VALUES)}.")
        self.kind, self.rewards = values, rollouts.rewards
        self.num_segments = len(forest.segments.start)
        self.parent = np.where(forest.segments.parent >= 0, forest.segments.parent, self.num_segments)
        self.through = self._rollouts_through(forest, rollouts.of_trajectory[rows])
        self.value = np.zeros(self.num_segments + 1)
        self.members = [np.zeros(0)] * (self.num_segments + 1)  # what each value is the mean of
        self._value_bottom_up()
        self.num_choices = self.num_equal_choices = 0

    def compared(self, scale: str, epsilon: float) -> np.ndarray:
        """[S] advantages, from the top down."""
        result = np.zeros(self.num_segments + 1)
        is_choice = np.zeros(self.num_segments + 1, dtype=bool)
        for segment in range(self.num_segments):  # parents come first in depth-first order
            above = self.parent[segment]
            if len(self.through[segment]) == len(self.through[above]):
                result[segment] = result[above]
                continue
            is_choice[above] = True
            members = self.members[above]
            if _is_equal(members):  # exactly 0, not what rounding leaves of it
                continue
            result[segment] = self.value[segment] - self.value[above]
            if scale == "siblings":
                result[segment] /= np.std(members, ddof=1) + epsilon
        self.num_choices = int(is_choice.sum())
        self.num_equal_choices = sum(_is_equal(self.members[fork]) for fork in np.flatnonzero(is_choice))
        return result[:-1]

    def _rollouts_through(self, forest: Forest, rollout_N: np.ndarray) -> list[np.ndarray]:
        """For every segment, and last for the virtual root, the distinct rollouts that pass, ascending."""
        segment_F = forest.segment_of_token[forest.path_index]
        is_start = forest.path_index == forest.segments.start[segment_F]
        rollout_F = np.repeat(rollout_N, forest.path_lengths)
        pairs = np.unique(np.stack([segment_F[is_start], rollout_F[is_start]], axis=1), axis=0)
        bounds = np.searchsorted(pairs[:, 0], np.arange(1, self.num_segments))
        return [*np.split(pairs[:, 1], bounds), np.unique(rollout_N)]

    def _value_bottom_up(self) -> None:
        children: list[list[int]] = [[] for _ in range(self.num_segments + 1)]
        for segment, above in enumerate(self.parent):
            children[above].append(segment)
        for segment in [*range(self.num_segments - 1, -1, -1), self.num_segments]:  # children first, the root last
            own = self.through[segment]
            members = self.rewards[own]
            if self.kind == "children" and children[segment]:
                going_on = np.concatenate([self.through[child] for child in children[segment]])
                ending = np.setdiff1d(own, going_on)
                members = np.array([self.value[child] for child in children[segment]])
                if len(ending):
                    members = np.append(members, self.rewards[ending].mean())
            self.members[segment] = members
            self.value[segment] = members.mean()


def _is_equal(members: np.ndarray) -> bool:
    """Whether values agree but for the rounding of their means."""
    return bool(np.ptp(members) <= 1e-12 * np.abs(members).max())
