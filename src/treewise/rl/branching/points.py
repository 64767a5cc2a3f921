"""Branch points of a rollout tree: where a new continuation may start, and which outcomes lie below.

A point (node, position) stands after the first `position` own tokens of a node, 1 or more, so that each place of the
tree has one name: what a node shares with its parent is a point of the parent.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treewise.rl.branching.rollout_tree import RolloutTree

KINDS = ("tokens", "turns")


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
            before = num_turns_before(tree, index)
            ends = node.turn_ends[node.turn_ends < len(node)]
            points += [Point(index, int(end), before + number + 1) for number, end in enumerate(ends)]
            continue
        before = tree.num_sampled_before(index, 0)
        depths = np.cumsum(node.is_sampled) - node.is_sampled + before
        points += [Point(index, int(at), int(depths[at])) for at in np.flatnonzero(node.is_sampled) if at > 0]
    return points


def has_branch(tree: RolloutTree, point: Point) -> bool:
    """Whether some continuation starts at a point already."""
    return any(tree[child].cut == point.position for child in tree.children(point.node))


def num_turns_before(tree: RolloutTree, index: int) -> int:
    """Turns that ended on the path before a node's own tokens."""
    return sum(int((tree[node].turn_ends <= end).sum()) for node, _, end in tree.pieces(index) if node != index)


def outcomes_below(tree: RolloutTree, point: Point, success_at: float) -> list[bool]:
    """Outcomes (`reward >= success_at`) of all judged rollouts through a point, in the order of their nodes."""
    through = [point.node]
    for child in tree.children(point.node):
        if tree[child].cut >= point.position:
            through += tree.below(child)
    rewards = [tree[index].reward for index in sorted(through)]
    return [reward >= success_at for reward in rewards if reward is not None]


def disagreements(outcomes: Sequence[bool]) -> tuple[int, int]:
    """How many disjoint pairs of outcomes differ, and how many pairs there are: (0, 1), (2, 3), ..."""
    num_pairs = len(outcomes) // 2
    return sum(outcomes[2 * i] != outcomes[2 * i + 1] for i in range(num_pairs)), num_pairs


def actions_at(tree: RolloutTree, point: Point, kind: str) -> list[tuple[int, ...]]:
    """What was done at a point so far: the next token of every continuation, or its next turn; repeats included."""
    node = tree[point.node]
    actions = [_action(node.token_ids, node.turn_ends, point.position, kind)]
    for child in tree.children(point.node):
        if tree[child].cut == point.position:
            actions.append(_action(tree[child].token_ids, tree[child].turn_ends, 0, kind))
    return [action for action in actions if action]


def _action(token_ids: np.ndarray, turn_ends: np.ndarray, start: int, kind: str) -> tuple[int, ...]:
    end = start + 1
    if kind == "turns":
        after = turn_ends[turn_ends > start]
        end = int(after[0]) if len(after) else len(token_ids)
    return tuple(token_ids[start:end].tolist())
