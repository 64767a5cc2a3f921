"""The tree of one group's rollouts, with the rollouts through each part: what credit on trees is gathered from.

Letters: S segments, R rollouts, N trajectories. A *state* is a segment's end, or the start before any token, which all
rollouts of the group start from: index S, the last of every [S + 1] array.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from treewise.advantages.rollout_table import Rollouts
from treewise.tree.forest import Forest


@dataclass(frozen=True, slots=True)
class GroupTree:
    """One group's tree.

    rows: indices of the group's trajectories, in the order of `forest.trajectories`.
    parent: [S + 1] int64, the state that a segment starts from; S for the first ones, and for S itself.
    through: for every state the distinct rollouts that pass, ascending.
    fork: [S + 1] int64, the nearest state above through which more rollouts pass than through the segment: where they
        parted. S where none does. Rows of one rollout that part are no fork.
    rewards: [R] float64, of all rollouts, of other groups too.
    """

    forest: Forest
    rows: np.ndarray
    parent: np.ndarray
    through: list[np.ndarray]
    fork: np.ndarray
    rewards: np.ndarray

    @property
    def num_segments(self) -> int:
        return len(self.parent) - 1

    @property
    def counts(self) -> np.ndarray:
        """[S + 1] int64, rollouts through each state."""
        return np.array([len(rollouts) for rollouts in self.through])

    def means(self, values_R: np.ndarray) -> np.ndarray:
        """[S + 1] float64, the mean over the rollouts through each state; exactly the value that all of them have."""
        return np.array([exact_mean(values_R[rollouts]) for rollouts in self.through])

    def over_children(
        self, values_R: np.ndarray, weights: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """[S + 1] float64, the mean over the children of each state, from the leaves up; and what was averaged.

        A child counts once however often it was sampled, or by its `weights` ([S]); rollouts that end at a state are
        one child together, of weight 1.
        """
        result = np.zeros(self.num_segments + 1)
        members: list[np.ndarray] = [result[:0]] * len(result)
        children = self.children
        for state in [*range(self.num_segments - 1, -1, -1), self.num_segments]:
            below = children[state]
            going_on = np.concatenate([np.zeros(0, dtype=np.int64), *(self.through[child] for child in below)])
            ending = np.setdiff1d(self.through[state], going_on)
            members[state] = result[below]
            member_weights = np.ones(len(below)) if weights is None else weights[below]
            if len(ending):
                members[state] = np.append(members[state], exact_mean(values_R[ending]))
                member_weights = np.append(member_weights, 1.0)
            result[state] = exact_mean(members[state], member_weights)
        return result, members

    @property
    def children(self) -> list[list[int]]:
        """For every state the segments that start from it."""
        result: list[list[int]] = [[] for _ in self.parent]
        for segment, above in enumerate(self.parent[:-1]):
            result[above].append(segment)
        return result

    def spread(self, values_S: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Each row, and the value of the segment of each of its tokens ([length])."""
        for row, path in zip(self.rows, self.forest.paths, strict=True):
            yield int(row), values_S[self.forest.segment_of_token[path]]


def group_trees(rollouts: Rollouts) -> Iterator[GroupTree]:
    """The tree of each group: prompts under one system prompt are never compared."""
    group_N = rollouts.group[rollouts.of_trajectory]
    for group in range(len(rollouts.group_names)):
        rows = np.flatnonzero(group_N == group)
        forest = Forest.from_trajectories([rollouts.trajectories[row] for row in rows])
        num_segments = len(forest.segments.start)
        above = forest.segments.parent
        parent = np.append(np.where(above >= 0, above, num_segments), num_segments)
        through = _rollouts_through(forest, rollouts.of_trajectory[rows])
        fork = np.full(num_segments + 1, num_segments)
        for segment in range(num_segments):  # parents come first in depth-first order
            start = parent[segment]
            fork[segment] = start if len(through[segment]) < len(through[start]) else fork[start]
        yield GroupTree(forest, rows, parent, through, fork, rollouts.rewards)


def on_segments(rollouts: Rollouts, values_of: Callable[[GroupTree], np.ndarray]) -> list[np.ndarray]:
    """Per-token advantages of all trajectories, from a function that gives each segment of a tree a value ([S])."""
    result: list[np.ndarray] = [np.zeros(0)] * len(rollouts.trajectories)
    for tree in group_trees(rollouts):
        for row, values in tree.spread(values_of(tree)):
            result[row] = values
    return result


def exact_mean(values: np.ndarray, weights: np.ndarray | None = None) -> float:
    """The mean; of values that agree but for the rounding of earlier means, one of them, so that differences are 0."""
    return float(values[0]) if is_equal(values) else float(np.average(values, weights=weights))


def is_equal(values: np.ndarray) -> bool:
    """Whether values agree but for the rounding of earlier means."""
    return bool(np.ptp(values) <= 1e-12 * np.abs(values).max())


def _rollouts_through(forest: Forest, rollout_N: np.ndarray) -> list[np.ndarray]:
    """For every segment, and last for the state before any, the distinct rollouts that pass, ascending."""
    segment_F = forest.segment_of_token[forest.path_index]
    is_start = forest.path_index == forest.segments.start[segment_F]
    rollout_F = np.repeat(rollout_N, forest.path_lengths)
    pairs = np.unique(np.stack([segment_F[is_start], rollout_F[is_start]], axis=1), axis=0)
    bounds = np.searchsorted(pairs[:, 0], np.arange(1, len(forest.segments.start)))
    return [*np.split(pairs[:, 1], bounds), np.unique(rollout_N)]
