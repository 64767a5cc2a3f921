"""What the parts of a rollout tree are worth, from the rewards of the rollouts below them.

A segment is a run of a node's own tokens without a branch inside; its value is that of the state at its end: the mean
over the ways that go on from there, which are the draws made there, each with its own value. It is the notion of value
of `treewise.advantages` (`group_tree`), which also pools states that other draws of the same tokens reached. A mean
over all rollouts below would weigh each part by how often it was sampled later, which depends on its outcomes where a
policy branches because outcomes are mixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treewise.rl.branching.rollout_tree import PROMPT, RolloutTree


@dataclass(frozen=True, slots=True)
class NodeValue:
    """The value of own tokens `[start, end)` of a node; of the prompt, `PROMPT`, 0, 0.

    value: None where no rollout below has a reward. num_leaves: rollouts with a reward below. num_draws: ways to go on
    with such rollouts, 0 where a rollout ends.
    """

    node: int
    start: int
    end: int
    value: float | None
    num_leaves: int
    num_draws: int


def node_values(tree: RolloutTree, success_at: float | None = None) -> list[NodeValue]:
    """The values of all segments: the prompt first, then node after node from its begin to its end.

    success_at: take `reward >= success_at` as 0 or 1 in place of the reward.
    """
    segments: list[list[NodeValue]] = [[] for _ in range(len(tree))]
    for index in reversed(range(len(tree))):  # whatever continues a node comes after it
        node, children = tree[index], tree.children(index)
        cuts = sorted({0, len(node), *(tree[child].cut for child in children)})
        values: list[NodeValue] = []  # from the node's end to its begin
        for start, end in zip(cuts[-2::-1], cuts[:0:-1], strict=True):
            if end == len(node) and node.has_ended:
                reward = node.reward
                if reward is not None and success_at is not None:
                    reward = float(reward >= success_at)
                values.append(NodeValue(index, start, end, reward, int(reward is not None), 0))
                continue
            going_on = values[-1:] + [segments[child][0] for child in children if tree[child].cut == end]
            values.append(_value_of(index, start, end, going_on))
        segments[index] = values[::-1]
    first = [segments[root][0] for root in tree.roots]
    prompt = _value_of(PROMPT, 0, 0, first)
    return [prompt, *(segment for own in segments for segment in own)]


def _value_of(node: int, start: int, end: int, going_on: Sequence[NodeValue]) -> NodeValue:
    known = [segment.value for segment in going_on if segment.value is not None]
    value = sum(known) / len(known) if known else None
    return NodeValue(node, start, end, value, sum(segment.num_leaves for segment in going_on), len(known))
