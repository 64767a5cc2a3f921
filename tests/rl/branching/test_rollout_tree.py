"""Rollout trees: paths, rows and accounts against plain loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rl.growing_trees import ToySampler, grow
from treewise.errors import DataError
from treewise.rl.branching import RolloutNode, RolloutTree, branching_named
from treewise.testing.strategies import MAX_SEED
from treewise.tree.forest import Forest


def by_hand() -> RolloutTree:
    """Prompt [1 2]; node 0 [3 4 99 5] (99 observed, turns end at 3 and 4); node 1 [6] after [3 4 99]; node 2 [7]."""
    tree = RolloutTree([1, 2], group="g")
    tree.add(RolloutNode([3, 4, 99, 5], [-1, -2, 0, -3], is_sampled=[1, 1, 0, 1], turn_ends=[3, 4], finish="stop"))
    tree.add(RolloutNode([6], [-4.0], parent=0, cut=3, finish="stop"))
    tree.add(RolloutNode([7], [-5.0], finish="length"))
    return tree


def test_rows_by_hand() -> None:
    tree = by_hand()
    tree.judge(0, reward=1.0)
    tree.judge(1, reward=0.0)
    tree.judge(2, error="the reward function raised")
    rows = tree.trajectories()
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 4, 99, 5], [1, 2, 3, 4, 99, 6]]
    assert [row.loss_weights.tolist() for row in rows] == [[0, 0, 1, 1, 0, 1]] * 2
    assert rows[1].sampler_logprobs.tolist() == [0, 0, -1, -2, 0, -4]
    assert [(row.group, row.rollout, row.reward) for row in rows] == [("g", 0, 1.0), ("g", 1, 0.0)]
    account = tree.account(rows)
    assert account == {"generated": 5, "recorded": 4, "trained": 4, "failed": 1, "unfinished": 0}


@given(
    name=st.sampled_from(["none", "random", "entropy", "segments", "turns", "lcr"]),
    seed=st.integers(0, MAX_SEED),
    budget=st.integers(1, 120),
    share_failed=st.sampled_from([0.0, 0.3]),
)
def test_every_generated_token_is_recorded_and_trained_once(name, seed, budget, share_failed) -> None:
    options = {"segment_tokens": 3, "width": 4, "first": 2} if name == "segments" else {}
    rng = np.random.default_rng(seed)
    tree, _ = grow(branching_named(name, **options), budget, ToySampler(seed), rng)
    for leaf in tree.leaves:
        if rng.random() < share_failed:
            tree.judge(leaf, error="timed out")
    rows = tree.trajectories()
    account = tree.account(rows)
    assert account["generated"] == sum(node.num_sampled for node in tree.nodes) >= budget
    assert account["generated"] == account["recorded"] + account["failed"] + account["unfinished"]
    assert account["trained"] == account["recorded"]
    if not share_failed and name != "segments":
        assert account["generated"] == account["trained"]
    if not rows:
        return
    # The same count from the rows alone, where no two continuations began alike: a place is what stands before it.
    places = {(tuple(row.token_ids[: at + 1])) for row in rows for at in np.flatnonzero(row.loss_weights)}
    forest = Forest.from_trajectories(rows)
    assert int((forest.token_weights("once") > 0).sum()) == len(places) <= account["trained"]


def test_nodes_cannot_be_written_to() -> None:
    ids = np.array([1, 2])
    node = RolloutNode(ids, [0, 0])
    ids[0] = 9
    assert node.token_ids[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        node.token_ids[0] = 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_ids": []}, "give at least one, flat"),
        ({"logprobs": [0.0]}, r"logprobs of shape \(1,\) for 2 tokens"),
        ({"logprobs": [0.0, np.nan]}, r"logprobs\[1\] is not finite"),
        ({"entropies": [0.0]}, "entropies of shape"),
        ({"top_ids": [[1]], "top_logprobs": [[0.0]]}, "top_ids of shape"),
        ({"turn_ends": [2, 1]}, r"turn_ends \[2, 1\] must ascend within 1..2"),
        ({"turn_ends": [3]}, "must ascend within 1..2"),
        ({"reward": 1.0}, "has not ended"),
        ({"finish": "stop", "reward": np.nan}, "a reward is nan; judge the rollout with error="),
    ],
)
def test_invalid_nodes(options, message: str) -> None:
    with pytest.raises(DataError, match=message):
        RolloutNode(**{"token_ids": [1, 2], "logprobs": [0.0, 0.0], **options})


def test_invalid_growth() -> None:
    tree = by_hand()
    for node, message in (
        (RolloutNode([1], [0], parent=7, cut=1), "node 3: parent 7 is not in the tree of 3 nodes"),
        (RolloutNode([1], [0], cut=1), "starts at the prompt"),
        (RolloutNode([1], [0], parent=0, cut=0), r"cut 0 of node 0 is outside 1..3"),
        (RolloutNode([1], [0], parent=0, cut=4), r"outside 1..3; it has ended"),
    ):
        with pytest.raises(DataError, match=message):
            tree.add(node)
    with pytest.raises(DataError, match="node 0 has no entropies"):
        tree.path(0, "entropies")
    with pytest.raises(DataError, match="1 rows for 0 rewarded"):
        tree.account([None])
