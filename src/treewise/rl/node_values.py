"""What the parts of a rollout tree are worth, from the rewards of the rollouts below them.

A segment is a run of a node's own tokens without a branch inside; its value is that of the state at its end. Two
estimators. `children`, the default, is the mean over the ways that go on from there, each with its own value. `leaves`
is the mean over all rollouts below, as in the papers of tree search. Where a policy branches because outcomes are
mixed, both are biased, since how often a part is sampled depends on its outcomes, and the mean over leaves is biased
far more: it weighs each part by how often it was sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treewise.errors import check_choice
from treewise.rl.branching.rollout_node import PROMPT
from treewise.rl.branching.rollout_tree import RolloutTree

ESTIMATORS = ("children", "leaves")
# "paper" is what the publications on tree search call the value of a node.
_ALIASES = {"paper": "leaves"}


@dataclass(frozen=True, slots=True)
class NodeValue:
    """The value of own tokens `[start, end)` of a node; of the prompt, `PROMPT`, 0, 0.

    value: None where no rollout below has a reward. num_leaves: rollouts with a reward below. num_children: ways to go
    on with such rollouts, 0 where a rollout ends. estimator: `children` or `leaves`.
    """

    node: int
    start: int
    end: int
    value: float | None
    num_leaves: int
    num_children: int
    estimator: str


def node_values(tree: RolloutTree, estimator: str = "children", success_at: float | None = None) -> list[NodeValue]:
    """The values of all segments: the prompt first, then node after node from its begin to its end.

    Parameters:
        estimator: `children`, or `leaves` (also called `paper`).
        success_at: take `reward >= success_at` as 0 or 1 in place of the reward.

    Raises:
        ConfigError: an unknown estimator.
    """
    estimator = _ALIASES.get(estimator, estimator)
    check_choice("estimator", estimator, [*ESTIMATORS, *_ALIASES])
    segments: list[list[NodeValue]] = [[] for _ in range(len(tree))]
    for index in reversed(range(len(tree))):  # whatever continues a node comes after it
        segments[index] = _segments_of(tree, index, segments, estimator, success_at)
    first = [segments[root][0] for root in tree.roots]
    prompt = _value_of(PROMPT, 0, 0, first, estimator)
    return [prompt, *(each for own in segments for each in own)]


def _segments_of(
    tree: RolloutTree, index: int, segments: Sequence[list[NodeValue]], estimator: str, success_at: float | None
) -> list[NodeValue]:
    """The segments of one node, from its end to its begin, returned from its begin."""
    node, children = tree[index], tree.children(index)
    cuts = sorted({0, len(node), *(tree[child].cut for child in children)})
    values: list[NodeValue] = []
    for start, end in zip(cuts[-2::-1], cuts[:0:-1], strict=True):
        if end == len(node) and node.has_ended:
            reward = node.reward
            if reward is not None and success_at is not None:
                reward = float(reward >= success_at)
            values.append(NodeValue(index, start, end, reward, int(reward is not None), 0, estimator))
            continue
        going_on = values[-1:] + [segments[child][0] for child in children if tree[child].cut == end]
        values.append(_value_of(index, start, end, going_on, estimator))
    return values[::-1]


def _value_of(node: int, start: int, end: int, going_on: Sequence[NodeValue], estimator: str) -> NodeValue:
    known = [(each.value, each.num_leaves) for each in going_on if each.value is not None]
    num_leaves = sum(count for _, count in known)
    value = None
    if known and estimator == "children":
        value = sum(each for each, _ in known) / len(known)
    elif known:
        value = sum(each * count for each, count in known) / num_leaves
    return NodeValue(node, start, end, value, num_leaves, len(known), estimator)
