"""`lcr`: branches where the outcome is open, by the posterior Label Change Rate.

Source: "Uncertainty-Guided Exploration for Efficient AlphaZero Training" (Cheng et al., NeurIPS 2025). The label change
rate of a state is the probability that two independent rollouts from it end differently, `2 v (1 - v)` for a
probability of success v. With a Beta prior of that mean and strength k, and s differing ones among m disjoint pairs of
outcomes below the state, its posterior mean is `(k 2v(1 - v) + s) / (k + m)`.

What differs from the paper: a state is a branch point of the rollout tree; v is a prediction (`Signals.success_at`),
not a search value. Backtracking stays among points beyond the threshold. Where no root can be varied, or all have V
variations, the next roots start. Sampling more where outcomes are mixed biases means over leaves (`rl/node_values.py`).

A move is the sampler's own, or is drawn from the candidates that the sampler recorded at the point, which are those
that top-k and top-p left. A candidate that was taken there is passed over, so the draw that is made is one of the
others, and its log-prob is the one among the others: `log p - log(sum of p over candidates that were not taken)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treewise.errors import check_choice
from treewise.rl.branching.points import KINDS, Point, actions_at, disagreements, outcomes_below, points_of
from treewise.rl.branching.protocol import Branch, Signals, require
from treewise.rl.branching.rollout_tree import RolloutTree
from treewise.rl.branching.variations import next_variations


@dataclass(frozen=True, slots=True, kw_only=True)
class LcrBranching:
    """Defaults are the paper's.

    roots: rollouts that start at the prompt at a time. variations: V, the most rollouts below one root. per_round: the
    most branches below one root in one round. threshold: LCR0, which a point must exceed. strength: k, the prior's
    weight in pairs; 0 leaves out the Bayesian part: the plain rate of the pairs, `2v(1 - v)` where there are none.
    weight_by_depth: draw points in proportion to their depth, else uniformly. success_at: rewards from here on are
    successes. points: `tokens` or `turns` (their ends).
    """

    roots: int = 1
    variations: int = 10
    per_round: int = 1
    threshold: float = 0.48
    strength: float = 10.0
    weight_by_depth: bool = True
    success_at: float = 0.5
    points: str = "tokens"

    def __post_init__(self) -> None:
        for name in ("roots", "variations", "per_round"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1.")
        require(0 <= self.threshold <= 1, f"threshold={self.threshold} must lie in 0..1; above 0.5 takes many pairs.")
        require(self.strength >= 0, f"strength={self.strength} must not be negative.")
        check_choice("points", self.points, KINDS)


def label_change_rate(success: float, num_changes: int, num_pairs: int, strength: float = 10.0) -> float:
    """`(k 2v(1 - v) + s) / (k + m)`; without pairs and prior, `2v(1 - v)`."""
    prior = 2 * success * (1 - success)
    if strength + num_pairs == 0:
        return prior
    return (strength * prior + num_changes) / (strength + num_pairs)


def open_outcomes(
    tree: RolloutTree, signals: Signals, settings: LcrBranching, rng: np.random.Generator
) -> list[Branch]:
    """Branches at points beyond the threshold, drawn in proportion to their depth; an action that was taken already
    moves the branch to an earlier point.
    """

    def pick(root: int, room: int) -> list[Branch]:
        points = points_of(tree, root, settings.points)
        rates = change_rates(tree, points, signals, settings)
        weights = np.array([point.depth if settings.weight_by_depth else 1.0 for point in points], dtype=np.float64)
        weights[rates <= settings.threshold] = 0.0
        branches: list[Branch] = []
        taken: set[tuple[int, int, int | None]] = set()
        for _ in range(room):
            if not weights.sum():
                break
            start = int(rng.choice(len(points), p=weights / weights.sum()))
            branch = _unexplored(tree, points, np.flatnonzero(weights), start, settings.points, taken, rng)
            if branch is None:
                break
            taken.add((branch.node, branch.position, branch.first_token))
            branches.append(branch)
        return branches

    return next_variations(tree, settings.roots, settings.variations, settings.per_round, pick)


def change_rates(tree: RolloutTree, points: Sequence[Point], signals: Signals, settings: LcrBranching) -> np.ndarray:
    """[P] float64, the label change rate of each point."""
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    rates = np.empty(len(points))
    for number, point in enumerate(points):
        # What lies below changes along a node only where a child branches off.
        key = (point.node, sum(tree[child].cut >= point.position for child in tree.children(point.node)))
        if key not in counts:
            counts[key] = disagreements(outcomes_below(tree, point, settings.success_at))
        success = signals.success_at(point.node, point.position)
        rates[number] = label_change_rate(success, *counts[key], settings.strength)
    return rates


def _unexplored(
    tree: RolloutTree,
    points: Sequence[Point],
    allowed: np.ndarray,
    start: int,
    kind: str,
    taken: set[tuple[int, int, int | None]],
    rng: np.random.Generator,
) -> Branch | None:
    """The branch at a point, or at the nearest earlier allowed one of its path whose action is new; None where there is
    none.

    With recorded candidates the action is drawn from them here; a point where one comes that was taken is passed over.
    Without, it is the sampler's, and a point at which an action has been repeated already counts as explored.
    """
    by_place = {(points[index].node, points[index].position): points[index] for index in allowed}
    ends = {node: end for node, _, end in tree.pieces(points[start].node, points[start].position)}
    path = [point for point in by_place.values() if point.position <= ends.get(point.node, 0)]
    for point in sorted(path, key=lambda each: (each.node, each.position), reverse=True):
        explored = actions_at(tree, point, kind)
        candidates = _candidates(tree, point, kind)
        if candidates is None:
            if len(set(explored)) == len(explored) and (point.node, point.position, None) not in taken:
                return Branch(point.node, point.position)
            continue
        ids, probabilities = candidates
        is_new = np.array([(t,) not in explored and (point.node, point.position, t) not in taken for t in ids])
        index = int(rng.choice(len(ids), p=probabilities))
        if is_new[index]:
            logprob = float(np.log(probabilities[index]) - np.log(probabilities[is_new].sum()))
            return Branch(point.node, point.position, first_token=ids[index], first_logprob=logprob)
    return None


def _candidates(tree: RolloutTree, point: Point, kind: str) -> tuple[list[int], np.ndarray] | None:
    """The candidates that the sampler recorded at a point, with their probabilities, which sum to 1; None without."""
    node = tree[point.node]
    if kind != "tokens" or node.top_ids is None or node.top_logprobs is None:
        return None
    logprobs = node.top_logprobs[point.position].astype(np.float64)
    is_there = np.isfinite(logprobs)
    if not is_there.any():
        return None
    probabilities = np.exp(logprobs[is_there] - logprobs[is_there].max())
    return node.top_ids[point.position][is_there].tolist(), probabilities / probabilities.sum()
