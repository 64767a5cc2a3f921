"""`lcr`: branches where the outcome is open, by the posterior Label Change Rate.

Source: "Uncertainty-Guided Exploration for Efficient AlphaZero Training" (Cheng et al., NeurIPS 2025). The label change
rate of a state is the probability that two independent rollouts from it end differently, `2 v (1 - v)` for a
probability of success v. With a Beta prior of that mean and strength k, and s differing ones among m disjoint pairs of
outcomes below the state, its posterior mean is `(k 2v(1 - v) + s) / (k + m)`.

What differs from the paper: a state is a branch point of the rollout tree; v is a prediction (`Signals`), not a search
value. Backtracking stays among points beyond the threshold. Where no root can be varied, or all have V variations, the
next roots start. Sampling more where outcomes are mixed biases means over leaves (`rl/node_values.py`).

A move is the sampler's own, or is drawn from the candidates that the sampler recorded at the point, which are those
that top-k and top-p left. A candidate that was taken there is passed over, so the draw that is made is one of the
others, and its log-prob is the one among the others: `log p - log(sum of p over candidates that were not taken)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from treewise.rl.branching.protocol import (
    Branch,
    Count,
    Kind,
    Point,
    Signals,
    children_at,
    next_variations,
    points_of,
)
from treewise.rl.branching.rollout_tree import RolloutNode, RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class LcrBranching:
    """Defaults are the paper's.

    roots: rollouts that start at the prompt at a time. variations: V, the most rollouts below one root. per_round: the
    most branches below one root in one round. threshold: LCR0, which a point must exceed. strength: k, the prior's
    weight in pairs; 0 leaves out the Bayesian part: the plain rate of the pairs, `2v(1 - v)` where there are none.
    weight_by_depth: draw points in proportion to their depth, else uniformly. success_at: rewards from here on are
    successes. points: `tokens` or `turns` (their ends).
    """

    roots: Count = 1
    variations: Count = 10
    per_round: Count = 1
    threshold: Annotated[float, Ge(0), Le(1), "above 0.5 takes many pairs"] = 0.48
    strength: Annotated[float, Ge(0)] = 10.0
    weight_by_depth: bool = True
    success_at: float = 0.5
    points: Kind = "tokens"

    def ask(self, tree: RolloutTree, signals: Signals, rng: np.random.Generator) -> list[Branch]:
        """Branches at points beyond the threshold, drawn in proportion to their depth; an action that was taken already
        moves the branch to an earlier point.
        """

        def pick(root: int, room: int) -> list[Branch]:
            points = points_of(tree, root, self.points)
            rates = change_rates(tree, points, signals, self)
            weights = np.array([point.depth if self.weight_by_depth else 1.0 for point in points], dtype=np.float64)
            weights[rates <= self.threshold] = 0.0
            allowed = [points[index] for index in np.flatnonzero(weights)]
            branches: list[Branch] = []
            for _ in range(room if allowed else 0):
                start = points[int(rng.choice(len(points), p=weights / weights.sum()))]
                branch = self._unexplored(tree, allowed, start, branches, rng)
                if branch is None:
                    break
                branches.append(branch)
            return branches

        return next_variations(tree, self.roots, self.variations, self.per_round, pick)

    def _unexplored(
        self,
        tree: RolloutTree,
        allowed: Sequence[Point],
        start: Point,
        asked: Sequence[Branch],
        rng: np.random.Generator,
    ) -> Branch | None:
        """The branch at a point, or at the nearest earlier allowed one of its path whose action is new; None where
        there is none.

        With recorded candidates the action is drawn from them here; a point where one comes that was taken is passed
        over. Without, it is the sampler's, and a point at which an action has been repeated already counts as explored.

        asked: the branches of this round.
        """
        ends = dict(tree.path_parts(start.node, start.position))
        path = [point for point in allowed if point.position <= ends.get(point.node, 0)]
        for point in sorted(path, key=lambda earlier: (earlier.node, earlier.position), reverse=True):
            taken = [
                branch.first_token for branch in asked if (branch.node, branch.position) == (point.node, point.position)
            ]
            explored = self._actions_at(tree, point)
            candidates = _candidates(tree[point.node], point.position) if self.points == "tokens" else None
            if candidates is None:
                if len(set(explored)) == len(explored) and not taken:
                    return Branch(point.node, point.position)
                continue
            ids, probabilities = candidates
            is_new = np.array([(token,) not in explored and token not in taken for token in ids])
            index = int(rng.choice(len(ids), p=probabilities))
            if is_new[index]:
                logprob = float(np.log(probabilities[index]) - np.log(probabilities[is_new].sum()))
                return Branch(point.node, point.position, first_token=ids[index], first_logprob=logprob)
        return None

    def _actions_at(self, tree: RolloutTree, point: Point) -> list[tuple[int, ...]]:
        """What was done at a point so far: the next token of every continuation, or its next turn; with repeats."""
        actions = []
        for node, start in [(tree[point.node], point.position), *((tree[n], 0) for n in children_at(tree, point))]:
            after = node.turn_ends[node.turn_ends > start]
            end = start + 1 if self.points == "tokens" else int(after[0]) if len(after) else len(node)
            actions.append(tuple(node.token_ids[start:end].tolist()))
        return [action for action in actions if action]


def change_rates(tree: RolloutTree, points: Sequence[Point], signals: Signals, settings: LcrBranching) -> np.ndarray:
    """[P] float64, the label change rate of each point: `(k 2v(1 - v) + s) / (k + m)`; without pairs and prior,
    `2v(1 - v)`.
    """
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    rates = np.empty(len(points))
    for number, point in enumerate(points):
        # What lies below changes along a node only where a child branches off.
        key = (point.node, sum(tree[child].cut >= point.position for child in tree.children(point.node)))
        if key not in counts:
            counts[key] = _disagreements(tree, point, settings.success_at)
        success = signals.node_success.get((point.node, point.position), signals.success)
        prior, (num_changes, num_pairs) = 2 * success * (1 - success), counts[key]
        weight = settings.strength + num_pairs
        rates[number] = (settings.strength * prior + num_changes) / weight if weight else prior
    return rates


def _disagreements(tree: RolloutTree, point: Point, success_at: float) -> tuple[int, int]:
    """Of the outcomes (`reward >= success_at`) of all judged rollouts through a point, in the order of their nodes, how
    many disjoint pairs differ, and how many pairs there are: (0, 1), (2, 3), ..."""
    through = [point.node]
    for child in tree.children(point.node):
        if tree[child].cut >= point.position:
            through += tree.below(child)
    rewards = [tree[index].reward for index in sorted(through)]
    outcomes = [reward >= success_at for reward in rewards if reward is not None]
    pairs = list(zip(outcomes[::2], outcomes[1::2], strict=False))
    return sum(one != other for one, other in pairs), len(pairs)


def _candidates(node: RolloutNode, position: int) -> tuple[list[int], np.ndarray] | None:
    """The candidates that the sampler recorded at a place, with their probabilities, which sum to 1; None without."""
    if node.top_ids is None or node.top_logprobs is None:
        return None
    logprobs = node.top_logprobs[position].astype(np.float64)
    is_there = np.isfinite(logprobs)
    if not is_there.any():
        return None
    probabilities = np.exp(logprobs[is_there] - logprobs[is_there].max())
    return node.top_ids[position][is_there].tolist(), probabilities / probabilities.sum()
