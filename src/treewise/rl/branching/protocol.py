"""What a branching policy sees and asks for, where a tree may branch, and the rounds that most policies share.

A policy is a frozen dataclass of settings with a method `ask(tree, signals, rng)`: a pure function of the tree so
far, which `policies.py` finds by name.

A point (node, position) stands after the first `position` own tokens of a node, 1 or more, so that each place of the
tree has one name: what a node shares with its parent is a point of the parent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
from annotated_types import Ge

from treewise.rl.branching.rollout_tree import PROMPT, RolloutTree

Count = Annotated[int, Ge(1)]
Kind = Literal["tokens", "turns"]


@dataclass(frozen=True, slots=True)
class Branch:
    """A request: continue after the first `position` own tokens of `node` (`PROMPT`, 0: from the prompt).

    count: independent continuations.
    first_token, first_logprob: their first token where the policy drew it already, from the candidates that the sampler
        recorded at this position, and the log-prob of that draw. It is generated, but not by the sampler. None: the
        sampler draws it.
    max_tokens: the most tokens to generate before the node is left unfinished; None for no limit but the loop's own.
    """

    node: int = PROMPT
    position: int = 0
    count: int = 1
    first_token: int | None = None
    first_logprob: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Signals:
    """What is known besides the tree.

    success: predicted probability of success of the task, in 0..1 (`SuccessBook`).
    node_success: the same for branch points that are known better, by (node, position).
    expected_tokens: tokens that a rollout of the task generates; used until the tree has rollouts of its own.
    longest_tokens: the most that one may generate. budget_left: generated tokens that the tree may still take.
    """

    success: float = 0.5
    node_success: Mapping[tuple[int, int], float] = field(default_factory=dict)
    expected_tokens: float | None = None
    longest_tokens: int | None = None
    budget_left: int | None = None


class Policy(Protocol):
    """Where a tree branches next."""

    def ask(self, tree: RolloutTree, signals: Signals, rng: np.random.Generator, /) -> list[Branch]:
        """The requests of the next round, however long they may get."""
        ...


class Point(NamedTuple):
    """After the first `position` own tokens of `node`. depth: generated tokens before it, or turns before it."""

    node: int
    position: int
    depth: int


def points_of(tree: RolloutTree, root: int, kind: str) -> list[Point]:
    """All branch points below one root, by node and position.

    `tokens`: before every generated token but a node's first. `turns`: at the ends of turns that were answered by
    another turn.
    """
    points = []
    for index in tree.below(root):
        node = tree[index]
        if kind == "turns":
            path = tree.path_parts(index)[:-1]
            before = sum(int((tree[other].turn_ends <= end).sum()) for other, end in path)
            ends = node.turn_ends[node.turn_ends < len(node)]
            points += [Point(index, int(end), before + number + 1) for number, end in enumerate(ends)]
            continue
        depths = np.cumsum(node.is_sampled) - node.is_sampled + tree.num_sampled_before(index, 0)
        points += [Point(index, int(at), int(depths[at])) for at in np.flatnonzero(node.is_sampled) if at > 0]
    return points


def children_at(tree: RolloutTree, point: Point) -> list[int]:
    """The nodes that continue a node at a point."""
    return [child for child in tree.children(point.node) if tree[child].cut == point.position]


def next_variations(
    tree: RolloutTree, roots: int, variations: int, per_round: int, pick: Callable[[int, int], list[Branch]]
) -> list[Branch]:
    """The next round: first rollouts from the prompt, then variations of each, then the next rollouts.

    A root and all that continues it are the variations of one rollout. Where no root may or can be varied, new roots
    start: with one variation a policy is `none`.

    Parameters:
        roots: rollouts that start at the prompt at a time.
        variations: the most rollouts below one root, itself included.
        per_round: the most branches below one root in one round.
        pick: chooses at most so many branches below a root; none where it has no reason to branch.
    """
    branches: list[Branch] = []
    for root in tree.roots:
        room = min(variations - len(tree.below(root)), per_round)
        if room > 0:
            branches += pick(root, room)
    return branches or [Branch(count=roots)]


def open_ends(tree: RolloutTree) -> list[int]:
    """Nodes that were left unfinished and that nothing continues yet."""
    return [index for index, node in enumerate(tree.nodes) if not node.has_ended and not tree.children(index)]
