"""Values of segments by hand, and against rollouts gathered by their paths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.growing_trees import ToySampler, grow
from treewise.rl.branching import PROMPT, RolloutNode, RolloutTree, branching_named
from treewise.rl.node_values import node_values
from treewise.testing.strategies import MAX_SEED


def by_hand() -> RolloutTree:
    """Node 0 has 5 tokens, node 1 and 2 branch off after 2, node 3 after 4; node 4 is another root."""
    tree = RolloutTree([1])
    for length, parent, cut, reward in (
        (5, PROMPT, 0, 1.0),
        (1, 0, 2, 0.0),
        (2, 0, 2, 1.0),
        (1, 0, 4, 0.0),
        (1, -1, 0, 0.0),
    ):
        index = tree.add(RolloutNode([7] * length, [0] * length, parent=parent, cut=cut, finish="stop"))
        tree.judge(index, reward)
    return tree


def test_rollouts_without_a_reward_are_left_out() -> None:
    tree = by_hand()
    tree.judge(0, error="timed out")
    values = node_values(tree)
    assert [(each.value, each.num_leaves, each.num_draws) for each in values[:4]] == [
        (1 / 6, 4, 2),
        (1 / 3, 3, 3),
        (0.0, 1, 1),
        (None, 0, 0),
    ]
    for leaf in tree.leaves:
        tree.judge(leaf, error="timed out")
    assert {each.value for each in node_values(tree)} == {None}


def test_rewards_may_count_as_success_or_not() -> None:
    tree = by_hand()
    tree.judge(4, reward=0.7)
    assert node_values(tree, success_at=0.6)[0].value == (0.5 + 1) / 2


@given(seed=st.integers(0, MAX_SEED), name=st.sampled_from(["random", "segments", "turns"]))
def test_against_rollouts_by_their_paths(seed: int, name: str) -> None:
    """A recursion over the states on these paths."""
    options = {"segment_tokens": 3, "width": 5, "first": 2} if name == "segments" else {}
    tree, _ = grow(branching_named(name, **options), 60, ToySampler(seed), np.random.default_rng(seed))
    paths = {leaf: [(n, at) for n, end in tree.path_parts(leaf) for at in range(end)] for leaf in tree.leaves}

    def through(place) -> list[int]:
        return [leaf for leaf, path in paths.items() if place in path]

    def by_children(leaves: list[int], depth: int) -> float:
        """The value of the state after `depth` tokens, which these rollouts share."""
        if any(len(paths[leaf]) == depth for leaf in leaves):
            (leaf,) = leaves
            return tree[leaf].reward
        parts = {}
        for leaf in leaves:
            parts.setdefault(paths[leaf][depth], []).append(leaf)
        return float(np.mean([by_children(part, depth + 1) for part in parts.values()]))

    for each in node_values(tree)[1:]:
        leaves = through((each.node, each.end - 1))
        assert each.num_leaves == len(leaves)
        if not leaves:
            assert each.value is None
        else:
            depth = paths[leaves[0]].index((each.node, each.end - 1)) + 1
            assert each.value == pytest.approx(by_children(leaves, depth))
