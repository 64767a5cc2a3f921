"""The tree of one group's rollouts, with the rollouts through each part: what credit on trees is gathered from.

Letters: S segments, R rollouts, N trajectories. A *state* is a segment's end, or the start before any token, which all
rollouts of the group start from: index S, the last of every [S + 1] array.

**The value of a state is the mean over draws.** A child counts as often as it was drawn from the state, each time with
its own value; that is what the draws that reached the state and went on are worth, and those whose rollout ended there
have its reward. `Trajectory.draws` holds which draw made each token. Where the rows have none, every rollout was drawn
on its own, and the value is the mean reward of the rollouts through the state. Draws of the same tokens lead to one
state; counted once together, they would make a token of probability 0.9 weigh no more than its alternative.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from treewise.advantages.rollout_table import Rollouts
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class GroupTree:
    """One group's tree.

    rows: indices of the group's trajectories, in the order of `forest.trajectories`.
    parent: [S + 1] int64, the state that a segment starts from; S for the first ones, and for S itself.
    children: for every state the segments that start from it.
    through: for every state the distinct rollouts that pass, ascending.
    fork: [S + 1] int64, the nearest state above through which more rollouts pass than through the segment: where they
        parted. S where none does. Rows of one rollout that part are no fork.
    rewards: [R] float64, of all rollouts, of other groups too.
    weights: for every state what each rollout of `through` counts in its value, summing to 1.
    num_draws: [S] float64, how often each segment was drawn from the state above. A draw whose rows part is divided.
    num_arrivals: [S + 1] int64, draws that reached each state and went on; 1 for the start.
    """

    forest: Forest
    rows: np.ndarray
    parent: np.ndarray
    children: list[list[int]]
    through: list[np.ndarray]
    fork: np.ndarray
    rewards: np.ndarray
    weights: list[np.ndarray]
    num_draws: np.ndarray
    num_arrivals: np.ndarray

    @property
    def num_segments(self) -> int:
        return len(self.parent) - 1

    @property
    def counts(self) -> np.ndarray:
        """[S + 1] int64, rollouts through each state."""
        return np.array([len(rollouts) for rollouts in self.through])

    def means(self, values_R: np.ndarray, weights: list[np.ndarray] | None = None) -> np.ndarray:
        """[S + 1] float64, the value of each state: of what the rollouts through it have, the mean over draws. Exactly
        the value that all of them have. weights: in place of the tree's.
        """
        pairs = zip(self.through, self.weights if weights is None else weights, strict=True)
        return np.array([exact_mean(values_R[rollouts], own) for rollouts, own in pairs])

    def deviations(self, values_R: np.ndarray) -> np.ndarray:
        """[S + 1] float64, the unbiased deviation of the same; of equal weights the one of n - 1. 0 for one rollout."""
        result = np.zeros(len(self.through))
        for state, (rollouts, own) in enumerate(zip(self.through, self.weights, strict=True)):
            if len(rollouts) > 1:
                centred = values_R[rollouts] - np.average(values_R[rollouts], weights=own)
                result[state] = np.sqrt((own * centred**2).sum() / (1 - (own**2).sum()))
        return result

    def ending_at(self, state: int) -> np.ndarray:
        """The rollouts that end at a state, ascending."""
        below = [self.through[child] for child in self.children[state]]
        return np.setdiff1d(self.through[state], np.concatenate([np.zeros(0, dtype=np.int64), *below]))

    def weights_by_draws(self, child_weights: np.ndarray) -> list[np.ndarray]:
        """`weights` where each draw of a segment counts by a weight ([S]) among those from its state, not once."""
        return _weights_by_draws(self.through, self.children, self.num_draws * child_weights, self.num_arrivals)

    def spread(self, values_S: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Each row, and the value of the segment of each of its tokens ([length])."""
        for row, path in zip(self.rows, self.forest.paths, strict=True):
            yield int(row), values_S[self.forest.segment_of_token[path]]


def group_trees(rollouts: Rollouts, *, of_draws: bool = False) -> Iterator[GroupTree]:
    """The tree of each group: prompts under one system prompt are never compared.

    of_draws: rollouts part where they were drawn apart, in place of where their tokens differ. Draws of the same tokens
        then stay two draws.
    """
    group_N = rollouts.group[rollouts.of_trajectory]
    for group in range(len(rollouts.group_names)):
        rows = np.flatnonzero(group_N == group)
        # Credit is of tokens and draws: rollouts that took other experts on the way are one part of the tree.
        items = [replace(rollouts.trajectories[row], routed_experts=None) for row in rows]
        forest = Forest.from_trajectories(
            _with_draws_for_tokens(items, rollouts.of_trajectory[rows]) if of_draws else items
        )
        num_segments = len(forest.segments.start)
        above = forest.segments.parent
        parent = np.append(np.where(above >= 0, above, num_segments), num_segments)
        children: list[list[int]] = [[] for _ in parent]
        for segment, start in enumerate(parent[:-1]):
            children[start].append(segment)
        rollout_N = rollouts.of_trajectory[rows]
        through = _rollouts_through(forest, rollout_N)
        fork = np.full(num_segments + 1, num_segments)
        for segment in range(num_segments):  # parents come first in depth-first order
            start = parent[segment]
            fork[segment] = start if len(through[segment]) < len(through[start]) else fork[start]
        has_draws = any(item.draws is not None for item in forest.trajectories)
        rollout_F = np.repeat(rollout_N, forest.path_lengths)
        draw_F = forest.flat_stream("draws") if has_draws else rollout_F
        draws, arrivals = _num_draws_and_arrivals(forest, parent, draw_F, rollout_F)
        weights = [np.full(len(each), 1 / len(each)) for each in through]
        if has_draws:
            weights = _weights_by_draws(through, children, draws, arrivals)
        yield GroupTree(forest, rows, parent, children, through, fork, rollouts.rewards, weights, draws, arrivals)


def on_segments(
    rollouts: Rollouts, values_of: Callable[[GroupTree], np.ndarray], *, of_draws: bool = False
) -> list[np.ndarray]:
    """Per-token advantages of all trajectories, from a function that gives each segment of a tree a value ([S])."""
    result: list[np.ndarray] = [np.zeros(0)] * len(rollouts.trajectories)
    for tree in group_trees(rollouts, of_draws=of_draws):
        for row, values in tree.spread(values_of(tree)):
            result[row] = values
    return result


def _with_draws_for_tokens(items: list[Trajectory], rollout_N: np.ndarray) -> list[Trajectory]:
    """Rows whose tokens are the numbers of their draws: of the rollout, where they have none."""
    rows = [
        np.full(len(item), rollout) if item.draws is None else item.draws
        for item, rollout in zip(items, rollout_N, strict=True)
    ]
    _, number = np.unique(np.concatenate(rows), return_inverse=True)
    split = np.split(number.reshape(-1), np.cumsum([len(row) for row in rows])[:-1])
    return [replace(item, token_ids=ids, images=()) for item, ids in zip(items, split, strict=True)]


def exact_mean(values: np.ndarray, weights: np.ndarray | None = None) -> float:
    """The mean; of values that agree but for the rounding of earlier means, one of them, so that differences are 0."""
    return float(values[0]) if is_equal(values) else float(np.average(values, weights=weights))


def is_equal(values: np.ndarray) -> bool:
    """Whether values agree but for the rounding of earlier means."""
    return bool(np.ptp(values) <= 1e-12 * np.abs(values).max())


def _num_draws_and_arrivals(
    forest: Forest, parent: np.ndarray, draw_F: np.ndarray, rollout_F: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[S] draws of each segment: the distinct ones at its first token; [S + 1] at its last, of rollouts that go on."""
    num_segments, num_rollouts = len(parent) - 1, int(rollout_F.max()) + 1
    segment_F = forest.segment_of_token[forest.path_index]
    is_start = forest.path_index == forest.segments.start[segment_F]
    segment, draw = np.unique(np.stack([segment_F[is_start], draw_F[is_start]]), axis=1)
    segment = segment.astype(np.int64)
    _, place, num_parts = np.unique(np.stack([parent[segment], draw]), axis=1, return_inverse=True, return_counts=True)
    num_draws = np.bincount(segment, weights=1 / num_parts[place.reshape(-1)], minlength=num_segments)
    is_last = forest.path_index == (forest.segments.start + forest.segments.lengths - 1)[segment_F]
    going_on = parent[segment_F[is_start]] * num_rollouts + rollout_F[is_start]
    is_last &= np.isin(segment_F * num_rollouts + rollout_F, going_on)
    ended, _ = np.unique(np.stack([segment_F[is_last], draw_F[is_last]]), axis=1)
    return num_draws, np.append(np.bincount(ended.astype(np.int64), minlength=num_segments), 1)


def _weights_by_draws(
    through: list[np.ndarray], children: list[list[int]], child_weights: np.ndarray, num_arrivals: np.ndarray
) -> list[np.ndarray]:
    """For every state the weights of the rollouts through it, from the leaves up."""
    result = [np.zeros(len(rollouts)) for rollouts in through]
    num_segments = len(through) - 1
    for state in [*range(num_segments - 1, -1, -1), num_segments]:  # children come after their parent
        is_ending = np.ones(len(through[state]), dtype=bool)
        below = children[state]
        share = num_arrivals[state] / child_weights[below].sum() if below else 0.0
        for child in below:
            own = np.searchsorted(through[state], through[child])
            result[state][own] += share * child_weights[child] * result[child]
            is_ending[own] = False
        result[state][is_ending] = 1.0
        result[state] /= result[state].sum()
    return result


def _rollouts_through(forest: Forest, rollout_N: np.ndarray) -> list[np.ndarray]:
    """For every segment, and last for the state before any, the distinct rollouts that pass, ascending."""
    segment_F = forest.segment_of_token[forest.path_index]
    is_start = forest.path_index == forest.segments.start[segment_F]
    rollout_F = np.repeat(rollout_N, forest.path_lengths)
    pairs = np.unique(np.stack([segment_F[is_start], rollout_F[is_start]], axis=1), axis=0)
    bounds = np.searchsorted(pairs[:, 0], np.arange(1, len(forest.segments.start)))
    return [*np.split(pairs[:, 1], bounds), np.unique(rollout_N)]
