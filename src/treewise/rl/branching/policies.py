"""Every branching policy by its name in a configuration, `lcr` of its own file, and the budget that all spend alike.

`none` samples independent rollouts, as flat RL does. `random` is the control that a rule has to beat.

`entropy` branches before the tokens whose distribution was the most uncertain. Two definitions are in use under this
name. `shannon`, which the papers' texts speak of, is the entropy `-sum p log p` of the distribution that a token was
drawn from. `surprisal`, `-log p` of the token that was drawn, is what TreeRL's EPTree computes (arXiv 2506.11902;
`tree_node.py`): one draw's estimate of the former.

`turns` branches at the ends of turns: drawn uniformly (Tree-GRPO, arXiv 2509.21240), or where the mean `-log p` of what
the policy wrote is the highest, less a penalty for each further branch (AT2PO, arXiv 2601.04767).

`segments` forks every path after each stretch of a fixed number of tokens, up to a width (TreePO, arXiv 2508.17445): a
first divergence, then an equal share of the width that is left for every path that goes on (`fixed_avg`), and, once all
have ended below the width, a fallback to an earlier segment of a path that ended, drawn at random. Unlike the paper's,
what was begun is finished before more begins: each path keeps the tokens that it may still take until its longest end,
and only what the budget has beyond that starts or forks another. So a budget that ends is not spent on paths that never
do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from treewise.base.given_settings import settings_named
from treewise.errors import DataError
from treewise.rl.branching.protocol import (
    Branch,
    Count,
    Kind,
    Point,
    Policy,
    Signals,
    children_at,
    next_variations,
    open_ends,
    points_of,
)
from treewise.rl.branching.rollout_tree import PROMPT, RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBranching:
    """roots: rollouts that start at the prompt in one round."""

    roots: Count = 8

    def ask(self, _tree: RolloutTree, _signals: Signals, _rng: np.random.Generator) -> list[Branch]:
        """Always `roots` more rollouts from the prompt."""
        return [Branch(count=self.roots)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomBranching:
    """roots: rollouts that start at the prompt at a time. variations: the most rollouts below one root. per_round: the
    most branches below one root in one round. points: `tokens` or `turns` (their ends).
    """

    roots: Count = 1
    variations: Count = 10
    per_round: Count = 1
    points: Kind = "tokens"

    def ask(self, tree: RolloutTree, _signals: Signals, rng: np.random.Generator) -> list[Branch]:
        """Branches at points of all variations so far, each as likely as another; without replacement in a round."""

        def pick(root: int, room: int) -> list[Branch]:
            return _uniform(points_of(tree, root, self.points), room, rng)

        return next_variations(tree, self.roots, self.variations, self.per_round, pick)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBranching:
    """roots, variations, per_round: as of `random`. definition: `shannon` (needs the sampler's entropies) or
    `surprisal`. EPTree's (M, N, T) = (6, 2, 2) is `roots=6, per_round=4, repeats=2, variations=5` by surprisal.

    repeats: branches at one point, in one round.
    """

    roots: Count = 1
    variations: Count = 10
    per_round: Count = 1
    repeats: Count = 1
    definition: Literal["shannon", "surprisal"] = "shannon"

    def ask(self, tree: RolloutTree, _signals: Signals, _rng: np.random.Generator) -> list[Branch]:
        """Branches before the tokens of the highest entropy, at points that have none yet; of equal ones the first.

        Raises:
            DataError: `shannon` without entropies.
        """

        def pick(root: int, room: int) -> list[Branch]:
            points = [point for point in points_of(tree, root, "tokens") if not children_at(tree, point)]
            scores = np.array([self._uncertainty(tree, point) for point in points])
            chosen = np.argsort(-scores, kind="stable")[: -(-room // self.repeats)]
            counts = [min(self.repeats, room - rank * self.repeats) for rank in range(len(chosen))]
            return [
                Branch(points[index].node, points[index].position, count)
                for index, count in zip(chosen, counts, strict=True)
            ]

        return next_variations(tree, self.roots, self.variations, self.per_round, pick)

    def _uncertainty(self, tree: RolloutTree, point: Point) -> float:
        node = tree[point.node]
        if self.definition == "surprisal":
            return -float(node.logprobs[point.position])
        if node.entropies is None:
            raise DataError(
                f"node {point.node} has no entropies; ask the sampler for them, or branch by definition='surprisal'."
            )
        return float(node.entropies[point.position])


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBranching:
    """roots, variations, per_round: as of `random`. order: `random` (Tree-GRPO) or `uncertain` (AT2PO). penalty: of
    `uncertain`, for each branch that a turn has besides the first continuation, in nats.
    """

    roots: Count = 2
    variations: Count = 5
    per_round: Count = 2
    order: Literal["random", "uncertain"] = "random"
    penalty: Annotated[float, Ge(0)] = 0.05

    def ask(self, tree: RolloutTree, _signals: Signals, rng: np.random.Generator) -> list[Branch]:
        """One branch at each chosen turn, which then goes on differently; turns that end a rollout are left out."""

        def pick(root: int, room: int) -> list[Branch]:
            points = points_of(tree, root, "turns")
            if self.order == "random":
                return _uniform(points, room, rng)
            penalties = [self.penalty * len(children_at(tree, point)) for point in points]
            scores = np.array([turn_surprisal(tree, point) for point in points]) - np.array(penalties)
            return [Branch(*points[index][:2]) for index in np.argsort(-scores, kind="stable")[:room]]

        return next_variations(tree, self.roots, self.variations, self.per_round, pick)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBranching:
    """segment_tokens: generated tokens of a segment. width: rollouts of a tree. first: segments that start at the
    prompt. branches: the most that continue one segment. fallback: whether to go back where all have ended.
    """

    segment_tokens: Count = 512
    width: Count = 16
    first: Count = 8
    branches: Count = 2
    fallback: bool = True

    def ask(self, tree: RolloutTree, signals: Signals, rng: np.random.Generator) -> list[Branch]:
        """Continues every segment that has not ended; once `width` rollouts ended, starts anew at the prompt.

        The nodes of the tree must be left unfinished where they reached `Branch.max_tokens`.
        """
        size, first = self.segment_tokens, min(self.first, self.width)
        growing = open_ends(tree)
        free = _Free(tree, signals, growing)
        num_trees = -(-len(tree.roots) // first)
        room = self.width * num_trees - len(tree.leaves)
        share, more = divmod(max(room, len(growing)), max(len(growing), 1))
        branches = []
        for number, index in enumerate(growing):
            forks = min(share + (number < more), self.branches) - 1
            branches.append(Branch(index, len(tree[index]), 1 + free.take(index, forks), max_tokens=size))
        missing = -len(tree.roots) % first  # of the last tree, where the budget did not reach for all
        if missing and (count := free.take(PROMPT, missing)):
            branches.append(Branch(PROMPT, 0, count, max_tokens=size))
        if branches:
            return branches
        ends = [index for index in range(len(tree)) if not tree[index].has_ended]
        if room > 0 and self.fallback and ends:
            index = int(rng.choice(ends))
            count = max(free.take(index, min(room, self.branches)), 1)
            return [Branch(index, len(tree[index]), count, max_tokens=size)]
        return [Branch(PROMPT, 0, max(free.take(PROMPT, first), 1), max_tokens=size)]


class _Free:
    """What a budget has beyond the longest ends of the paths that grow; without limit where one is not known."""

    def __init__(self, tree: RolloutTree, signals: Signals, growing: Sequence[int]) -> None:
        self.tree, self.longest = tree, signals.longest_tokens
        self.left = None if self.longest is None else signals.budget_left
        if self.left is not None:
            self.left -= sum(map(self._cost, growing))

    def take(self, index: int, wanted: int) -> int:
        """How many of so many further paths from the end of a node (or `PROMPT`) may begin."""
        if self.left is None or wanted <= 0:
            return max(wanted, 0)
        count = min(wanted, max(self.left // self._cost(index), 0))
        self.left -= count * self._cost(index)
        return count

    def _cost(self, index: int) -> int:
        assert self.longest is not None
        done = 0 if index == PROMPT else self.tree.num_sampled_before(index, len(self.tree[index]))
        return max(self.longest - done, 1)


def turn_surprisal(tree: RolloutTree, point: Point) -> float:
    """Mean `-log p` of the tokens that the policy wrote in the turn that ends at a point, of the node's own."""
    node = tree[point.node]
    earlier = node.turn_ends[node.turn_ends < point.position]
    turn = slice(int(earlier[-1]) if len(earlier) else 0, point.position)
    own = node.is_sampled[turn]
    return -float(node.logprobs[turn][own].mean(dtype=np.float64)) if own.any() else 0.0


def _uniform(points: Sequence[Point], room: int, rng: np.random.Generator) -> list[Branch]:
    if not points:
        return []
    chosen = rng.choice(len(points), size=min(room, len(points)), replace=False)
    return [Branch(*points[index][:2]) for index in chosen]


BRANCHINGS: Mapping[str, type | str] = {  # or the name of one, which is imported when it is asked for
    "none": NoBranching,
    "random": RandomBranching,
    "entropy": EntropyBranching,
    "segments": SegmentBranching,
    "turns": TurnBranching,
    "lcr": "treewise.experimental.lcr:LcrBranching",
}


@dataclass(frozen=True, slots=True)
class Branching:
    """A policy by its name; make one with `branching_named`."""

    name: str
    settings: Policy

    @property
    def streams(self) -> tuple[str, ...]:
        """What the sampler must record besides tokens and their log-probs: `entropies` or nothing."""
        return ("entropies",) if getattr(self.settings, "definition", None) == "shannon" else ()

    def next_requests(
        self, tree: RolloutTree, signals: Signals, budget_left: int, rng: np.random.Generator
    ) -> list[Branch]:
        """The requests of the next round, which may be sampled as one batch; empty where the budget is spent and every
        path has ended (or nothing tells how long one may get: `Signals.longest_tokens`).

        Of those that the rule asks for, the first whose expected tokens fit what is left, at least one continuation; a
        path that was begun and has not ended goes on in any case, where its longest end is known. A continuation is
        expected to generate the mean length of the rollouts that ended so far, less what is generated before its
        position. So all rules spend a budget alike: rounds go on while any of it is left, and the last one passes it by
        about one rollout at most.

        Parameters:
            tree: so far; a rollout without a reward has no outcome.
            budget_left: generated tokens (`RolloutTree.num_sampled_tokens` counts those spent).
        """
        unfinished = [] if signals.longest_tokens is None else open_ends(tree)
        if budget_left <= 0 and not unfinished:
            return []
        signals = replace(signals, budget_left=budget_left)
        lengths = [tree.num_sampled_before(leaf, len(tree[leaf])) for leaf in tree.leaves]
        typical = float(np.mean(lengths)) if lengths else signals.expected_tokens
        affordable: list[Branch] = []
        left, is_full = float(budget_left), budget_left <= 0
        for branch in self.settings.ask(tree, signals, rng):
            least = int(branch.node in unfinished or not (affordable or is_full))
            if typical is None or is_full:
                count = least if is_full else branch.count
                affordable += [replace(branch, count=count)] if count else []
                continue
            cost = max(1.0, typical - tree.num_sampled_before(branch.node, branch.position))
            if branch.max_tokens is not None:
                cost = min(cost, branch.max_tokens)
            count = min(branch.count, max(int(left // cost), least))
            if count:
                affordable.append(replace(branch, count=count))
            left -= cost * count
            is_full = count < branch.count
        return affordable


def branching_named(name: str, **settings: object) -> Branching:
    """The policy of a configuration: `branching_named("lcr", variations=5)`. Raises as `settings_named`."""
    return Branching(name, settings_named("branching", name, BRANCHINGS, settings))
