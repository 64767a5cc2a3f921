"""Declared trees: the trajectories they stand for, merging of equal siblings, and every error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treewise.tree.forest
from treewise.errors import ConfigError, DataError
from treewise.testing.strategies import declared_nodes
from treewise.tree.declared import chain_nodes
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import path_to
from treewise.tree.trajectory import Trajectory

STREAMS = ("loss_weights", "advantages", "old_logprobs")


def path_of(parents, node):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def leaves_of(parents):
    return [node for node in range(len(parents)) if node not in parents]


def random_streams(parents, token_ids, seed):
    """Streams per node; siblings with equal tokens are given equal values, so that they may be merged."""
    streams = {name: [] for name in STREAMS}
    for node, ids in enumerate(token_ids):
        same = repr([token_ids[each] for each in path_of(parents, node)])
        rng = np.random.default_rng([seed, *same.encode()])
        weights = rng.choice([0.5, 1.0], len(ids))
        weights[0] *= parents[node] >= 0
        streams["loss_weights"].append(weights)
        streams["advantages"].append(rng.normal(size=len(ids)))
        streams["old_logprobs"].append(-rng.exponential(size=len(ids)))
    return streams


@given(declared_nodes(), st.booleans(), st.integers(0, 99))
def test_every_end_is_a_trajectory(nodes, merge_siblings, seed):
    parents, token_ids = nodes
    streams = random_streams(parents, token_ids, seed)
    forest = Forest.from_nodes(parents, token_ids, **streams, merge_siblings=merge_siblings, group="g", source="a:1")
    assert forest.num_trajectories == len(leaves_of(parents))
    for number, leaf in enumerate(leaves_of(parents)):
        path, item = path_of(parents, leaf), forest.trajectories[number]
        assert item.token_ids.tolist() == [token for node in path for token in token_ids[node]]
        assert forest.token_ids[forest.paths[number]].tolist() == item.token_ids.tolist()
        for name in STREAMS:
            expected = np.concatenate([streams[name][node] for node in path]).astype(np.float32)
            np.testing.assert_array_equal(getattr(item, name), expected)
        assert (item.group, item.source) == ("g", f"a:1, node {leaf}")


@given(declared_nodes())
def test_siblings_are_kept_apart_or_merged(nodes):
    parents, token_ids = nodes
    apart = Forest.from_nodes(parents, token_ids, merge_siblings=False)
    assert apart.num_tokens == sum(map(len, token_ids))
    merged = Forest.from_nodes(parents, token_ids, merge_siblings=True)
    distinct = {tuple(tuple(token_ids[each]) for each in path_of(parents, node)) for node in range(len(parents))}
    assert merged.num_tokens == sum(len(path[-1]) for path in distinct)


@given(declared_nodes())
def test_a_declared_tree_equals_its_trajectories(nodes):
    parents, token_ids = nodes
    token_ids = [[100 * node + token for token in ids] for node, ids in enumerate(token_ids)]  # nothing left to merge
    items = [Trajectory([t for each in path_of(parents, leaf) for t in token_ids[each]]) for leaf in leaves_of(parents)]
    declared, merged = Forest.from_nodes(parents, token_ids), Forest.from_trajectories(items)
    for name in ("num_tokens", "num_tree_pairs", "num_flat_pairs", "num_leaf_tokens", "num_trees"):
        assert getattr(declared, name) == getattr(merged, name), name
    np.testing.assert_array_equal(declared.path_lengths, merged.path_lengths)
    for one, two in zip(declared.paths, merged.paths, strict=True):
        np.testing.assert_array_equal(declared.multiplicity[one], merged.multiplicity[two])
        np.testing.assert_array_equal(declared.subtree_end[one] - one, merged.subtree_end[two] - two)


@given(declared_nodes(), st.integers(0, 99))
def test_a_tree_too_large_to_hold_flat_keeps_its_streams_once(nodes, seed):
    parents, token_ids = nodes
    streams = random_streams(parents, token_ids, seed)
    small = Forest.from_nodes(parents, token_ids, **streams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(treewise.tree.forest, "MAX_FLAT_TOKENS", 1)
        large = Forest.from_nodes(parents, token_ids, **streams)
    assert large.tree_streams
    assert not small.tree_streams
    for one, two in zip(large.trajectories, small.trajectories, strict=True):
        assert one.source == two.source
        assert list(one.streams) == list(two.streams)
        for name, values in two.streams.items():
            np.testing.assert_array_equal(getattr(one, name), values)
    assert not large.has_stream("ref_logprobs")
    for name in STREAMS:
        assert large.has_stream(name)
        np.testing.assert_array_equal(large.flat_stream(name), small.flat_stream(name))
    for weighting in ("per_trajectory", "once", "per_rollout"):
        np.testing.assert_allclose(large.token_weights(weighting), small.token_weights(weighting), rtol=1e-12)
        np.testing.assert_allclose(large.flat_weights(weighting), small.flat_weights(weighting), rtol=1e-12)
    with pytest.raises(ConfigError, match="'twice'"):
        large.token_weights("twice")
    beside = Forest.concatenate([large, small])
    for name in STREAMS:
        np.testing.assert_array_equal(beside.flat_stream(name), np.concatenate([small.flat_stream(name)] * 2))


def test_a_large_tree_cannot_stand_beside_trajectories_that_disagree(monkeypatch):
    items = [Trajectory([1, 2], advantages=1), Trajectory([1, 2], advantages=2)]
    monkeypatch.setattr(treewise.tree.forest, "MAX_FLAT_TOKENS", 2)
    large = Forest.from_nodes([-1], [[1, 2, 3]], advantages=[[0, 1, 1]])
    monkeypatch.undo()
    with pytest.raises(DataError, match="disagree in the advantages"):
        Forest.concatenate([large, Forest.from_trajectories(items)])


def test_marked_nodes_end_trajectories_too():
    forest = Forest.from_nodes([-1, 0, 0], [[1, 2], [3], [4]], ends=[True, True, True])
    assert [item.token_ids.tolist() for item in forest.trajectories] == [[1, 2], [1, 2, 3], [1, 2, 4]]
    assert forest.num_leaf_tokens == 6


def test_equal_leaves_merged_are_two_trajectories():
    forest = Forest.from_nodes([-1, 0, 0], [[1, 2], [3], [3]])
    assert forest.num_tokens == 3
    assert forest.multiplicity.tolist() == [2, 2, 2]
    assert [item.source for item in forest.trajectories] == ["declared tree, node 1", "declared tree, node 2"]


def test_the_first_token_of_a_root_is_not_trained_by_default():
    forest = Forest.from_nodes([-1, 0, -1], [[1, 2], [3], [5, 6]])
    assert forest.token_weights()[forest.parent < 0].tolist() == [0, 0]
    assert forest.token_weights().sum() == forest.num_flat_tokens - 2


BAD_TREES = [
    ({"parents": [0, -1]}, "node 0 is its own parent"),
    ({"parents": [-1, 2, 0], "token_ids": [[1], [2], [3]]}, "node 1 has parent 2, which comes after it"),
    ({"parents": [-1, 7]}, r"node 1 has parent 7, which does not exist \(2 nodes"),
    ({"parents": [-1, -2]}, "node 1 has parent -2, which does not exist"),
    ({"parents": []}, "parents must be a flat, non-empty list of integers"),
    ({"parents": [-1, 0.5]}, "parents must be a flat, non-empty list of integers"),
    ({"parents": [[-1, 0]]}, "parents must be a flat, non-empty list of integers"),
    ({"parents": [-1, [0]]}, "parents is not a flat sequence"),
    ({"parents": [-1, None]}, "parents must be a flat, non-empty list of integers"),
    ({"token_ids": [[1, 2]]}, "1 token_ids lists for 2 nodes"),
    ({"token_ids": [[1, 2], []]}, "node 1: token_ids is empty; merge it into its parent"),
    ({"token_ids": [[1, 2], [3.0]]}, "node 1: token_ids must be a flat list of integers, found float64"),
    ({"token_ids": [[1, 2], [True]]}, "node 1: token_ids must be a flat list of integers, found bool"),
    ({"token_ids": [[1, 2], ["3"]]}, "node 1: token_ids must be a flat list of integers, found <U1"),
    ({"token_ids": [[1, 2], [[3]]]}, "node 1: token_ids must be a flat list"),
    ({"token_ids": [[1, 2], 3]}, "node 1: token_ids must be a flat list"),
    ({"token_ids": [[1, 2], [3, [4]]]}, "node 1: token_ids is not a flat sequence"),
    ({"token_ids": [[1, 2], [3, -4]]}, "node 1: token id -4 at position 1 is outside"),
    ({"token_ids": [[1, 2**31], [3]]}, "node 0: token id 2147483648 at position 1 is outside"),
    ({"token_ids": [[1, 2], [2**63]]}, "node 1: token id 9223372036854775808 at position 0 is outside"),
    ({"loss_weights": [[0, 1]]}, "1 loss_weights lists for 2 nodes"),
    ({"loss_weights": [[0, 1], [1, 1]]}, "node 1: 2 loss_weights for 1 tokens"),
    ({"loss_weights": [[1, 1], [1]]}, r"node 0: loss_weights\[0\] is 1, but nothing predicts a first token"),
    ({"loss_weights": [[0, 1], [-1]]}, "node 1: loss weight -1 at position 0 is negative"),
    ({"loss_weights": [[0, 0], [0]]}, "node 1: no trained token"),
    ({"advantages": [[0, 1], [float("nan")]]}, r"node 1: advantages\[0\] is nan"),
    ({"advantages": [[0, 1], [None]]}, "node 1: advantages must be a flat list of numbers"),
    ({"advantages": [[0, 1], [1e39]]}, r"node 1: advantages\[0\] is 1e\+39"),
    ({"old_logprobs": [[0, float("inf")], [0]]}, r"node 0: old_logprobs\[1\] is inf"),
    ({"ends": [True]}, "1 end marks for 2 nodes"),
    ({"ends": [True, False]}, "node 1 is a leaf but not an end"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TREES)
def test_bad_trees_are_refused_by_node(change, message):
    arguments = {"parents": [-1, 0], "token_ids": [[1, 2], [3]], **change}
    with pytest.raises(DataError, match=message) as error:
        Forest.from_nodes(**arguments, source="tree.jsonl:3")
    assert str(error.value).startswith("tree.jsonl:3")


def test_merged_siblings_must_agree():
    arguments = {"parents": [-1, 0, 0], "token_ids": [[1, 2], [3], [3]], "advantages": [[0, 0], [1], [2]]}
    with pytest.raises(DataError, match="nodes 1 and 2 are siblings with equal tokens but different advantages"):
        Forest.from_nodes(**arguments)
    assert Forest.from_nodes(**arguments, merge_siblings=False).num_tokens == 4


@given(declared_nodes(), st.data())
def test_declared_nodes_keep_their_paths(nodes, data):
    parents, token_ids = nodes
    lengths = np.array([len(ids) for ids in token_ids])
    offsets = np.cumsum(lengths) - lengths
    ends = np.array(data.draw(st.lists(st.integers(0, len(parents) - 1), min_size=1, max_size=5)))
    segments = chain_nodes(np.array(parents), lengths, ends, offsets)
    segment_of_node = chain_nodes(np.array(parents), lengths, np.arange(len(parents)), offsets).end_segment
    assert sorted(segment_of_node.tolist()) == list(range(len(parents)))
    assert segments.end_segment.tolist() == segment_of_node[ends].tolist()
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path = list(range(offsets[at], offsets[at] + lengths[at])) + path
            at = parents[at]
        found = segments.token_source[path_to(segments, int(segment_of_node[node]))]
        assert found.tolist() == path
