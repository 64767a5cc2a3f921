"""Forests against brute force: dictionaries of prefixes and ancestor matrices; real rows; deep and wide extremes."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treewise.tree.forest
from tests.plain_trees import is_above
from treewise.errors import ConfigError, DataError
from treewise.testing.strategies import forests, random_tree, trajectories
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

STREAMS = ("loss_weights", "advantages", "old_logprobs", "ref_logprobs")


def prefix_counts(items):
    """Every distinct prefix, and the number of trajectories that begin with it."""
    return Counter(
        tuple(ids[:length]) for ids in (item.token_ids.tolist() for item in items) for length in range(1, len(ids) + 1)
    )


def prefix_of_token(forest):
    """The tokens on the path to each token, by walking up."""
    found = []
    for token, above in zip(forest.token_ids.tolist(), forest.parent.tolist(), strict=True):
        found.append((*(found[above] if above >= 0 else ()), token))
    return found


def leaves_of(items):
    """Distinct trajectories that are not a proper prefix of another one."""
    distinct = {tuple(item.token_ids.tolist()) for item in items}
    return [one for one in distinct if not any(len(two) > len(one) and two[: len(one)] == one for two in distinct)]


# -- tokens ---------------------------------------------------------------------------------------------------------


@given(trajectories())
def test_tokens_are_the_distinct_prefixes_with_their_depth_and_multiplicity(items):
    forest = Forest.from_trajectories(items)
    counts = prefix_counts(items)
    found = prefix_of_token(forest)
    assert len(found) == len(set(found)) == forest.num_tokens
    assert dict(zip(found, forest.multiplicity.tolist(), strict=True)) == counts
    assert forest.depth.tolist() == [len(prefix) - 1 for prefix in found]
    assert forest.num_trees == len({prefix[0] for prefix in found})
    assert forest.tree_starts.tolist() == np.flatnonzero(forest.parent < 0).tolist()


@given(trajectories())
def test_paths_spell_the_trajectories_in_input_order(items):
    forest = Forest.from_trajectories(items)
    assert len(forest.paths) == forest.num_trajectories == len(items)
    lazy = [forest.paths[number] for number in range(len(items))]
    assert [forest.token_ids[path].tolist() for path in lazy] == [item.token_ids.tolist() for item in items]
    assert forest.ends.tolist() == [path[-1] for path in lazy]
    assert forest.path_index.tolist() == np.concatenate(lazy).tolist()
    assert [path.tolist() for path in forest.paths] == [path.tolist() for path in lazy]  # now sliced from the index


def test_paths_behave_like_a_sequence():
    forest = Forest.from_trajectories([Trajectory([1, 2]), Trajectory([1, 3]), Trajectory([4, 5])])
    assert forest.paths[-1].tolist() == forest.paths[2].tolist()
    assert [path.tolist() for path in forest.paths[1:]] == [forest.paths[1].tolist(), forest.paths[2].tolist()]
    with pytest.raises(IndexError, match="index 3 of 3 items"):
        forest.paths[3]


@given(forests())
def test_a_query_sees_a_key_exactly_when_its_interval_says_so(forest):
    position = np.arange(forest.num_tokens)
    interval = (position[None] <= position[:, None]) & (position[:, None] < forest.subtree_end[None])
    np.testing.assert_array_equal(interval, is_above(forest.parent))


@given(forests(max_sequences=12))
def test_a_path_has_at_most_log2_segments_plus_1_contiguous_runs(forest):
    limit = math.log2(len(forest.segments.start)) + 1
    assert all(1 + np.count_nonzero(np.diff(path) != 1) <= limit for path in forest.paths)


def test_paths_of_large_trees_have_few_contiguous_runs():
    rng = np.random.default_rng(0)
    for _ in range(8):
        forest = random_tree(rng, 500, 3)
        limit = math.log2(len(forest.segments.start)) + 1
        assert max(1 + np.count_nonzero(np.diff(path) != 1) for path in forest.paths) <= limit


# -- sizes ----------------------------------------------------------------------------------------------------------


@given(trajectories())
def test_sizes_and_ratios(items):
    forest = Forest.from_trajectories(items)
    lengths = [len(item) for item in items]
    leaves = leaves_of(items)
    num_tokens = len(prefix_counts(items))
    tree_pairs = int(is_above(forest.parent).sum())
    assert forest.num_flat_tokens == sum(lengths)
    assert forest.share_ratio == sum(lengths) / num_tokens
    assert forest.num_leaf_tokens == sum(map(len, leaves))
    assert forest.leaf_ratio == sum(map(len, leaves)) / num_tokens
    assert forest.num_flat_pairs == sum(n * (n + 1) // 2 for n in lengths)
    assert forest.num_tree_pairs == tree_pairs
    assert forest.pair_ratio == forest.num_flat_pairs / tree_pairs


@given(trajectories(), st.randoms(use_true_random=False))
def test_input_order_changes_nothing_but_the_order_of_paths(items, shuffler):
    order = list(range(len(items)))
    shuffler.shuffle(order)
    forest, shuffled = Forest.from_trajectories(items), Forest.from_trajectories([items[number] for number in order])
    np.testing.assert_array_equal(forest.token_ids, shuffled.token_ids)
    np.testing.assert_array_equal(forest.parent, shuffled.parent)
    np.testing.assert_array_equal(forest.multiplicity, shuffled.multiplicity)
    assert [forest.paths[number].tolist() for number in order] == [path.tolist() for path in shuffled.paths]


# -- streams --------------------------------------------------------------------------------------------------------


@given(trajectories())
def test_flat_streams_are_the_trajectories_own(items):
    forest = Forest.from_trajectories(items)
    for name in STREAMS:
        assert forest.has_stream(name)
        np.testing.assert_array_equal(forest.flat_stream(name), np.concatenate([getattr(item, name) for item in items]))


def test_a_missing_stream_is_named():
    with_stream, without = Trajectory([1, 2], advantages=1), Trajectory([1, 3], source="rows.jsonl:2")
    forest = Forest.from_trajectories([with_stream, without, Trajectory([1, 4])])
    assert not forest.has_stream("advantages")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: no advantages"):
        forest.flat_stream("advantages")
    with pytest.raises(DataError, match="trajectory 1: no advantages"):
        Forest.from_trajectories([with_stream, Trajectory([1, 3])]).flat_stream("advantages")


@given(trajectories())
def test_weights_per_trajectory_add_up(items):
    forest = Forest.from_trajectories(items)
    np.testing.assert_array_equal(forest.flat_weights(), forest.flat_stream("loss_weights"))
    total = np.zeros(forest.num_tokens)
    for item, path in zip(items, forest.paths, strict=True):
        total[path] += item.loss_weights
    np.testing.assert_allclose(forest.token_weights(), total, rtol=1e-12)


@given(trajectories())
def test_weights_once_are_the_mean_over_those_who_train_the_token(items):
    forest = Forest.from_trajectories(items)
    given_weights = {}
    for item, path in zip(items, forest.paths, strict=True):
        for token, weight in zip(path.tolist(), item.loss_weights.tolist(), strict=True):
            if weight > 0:
                given_weights.setdefault(token, []).append(weight)
    tokens = [np.mean(given_weights.get(token, [0])) for token in range(forest.num_tokens)]
    np.testing.assert_allclose(forest.token_weights("once"), tokens, rtol=1e-12)
    flat = forest.flat_weights("once")
    assert flat.dtype == np.float64
    np.testing.assert_array_equal(flat == 0, forest.flat_stream("loss_weights") == 0)
    np.testing.assert_allclose(np.bincount(forest.path_index, flat, forest.num_tokens), tokens, rtol=1e-12)


@given(trajectories(), st.integers(0, 2**16))
def test_weights_per_rollout_are_the_mean_over_the_rows_of_a_rollout(items, seed):
    """Each rollout alone, once; the rollouts added up."""
    owner = np.random.default_rng(seed).integers(0, 3, len(items))
    items = [replace(item, group="g", rollout=int(number)) for item, number in zip(items, owner, strict=True)]
    forest = Forest.from_trajectories(items)
    expected = np.zeros(forest.num_tokens)
    for number in set(owner.tolist()):
        rows = np.flatnonzero(owner == number)
        alone = Forest.from_trajectories([items[row] for row in rows])
        weights = alone.token_weights("once")
        for row, path in zip(rows, alone.paths, strict=True):
            expected[forest.paths[row]] += np.where(np.isfinite(weights[path]), weights[path], 0)
            weights[path] = np.nan  # a token of several rows is added once
    np.testing.assert_allclose(forest.token_weights("per_rollout"), expected, rtol=1e-12)


def test_rollouts_are_numbered_within_their_group():
    pairs = [("a", 1), ("b", 1), ("a", 1), ("a", None), (None, None), ("a", 2)]
    items = [Trajectory([1, 2], group=group, rollout=rollout) for group, rollout in pairs]
    assert Forest.from_trajectories(items).rollout_of_trajectory.tolist() == [0, 1, 0, 2, 3, 4]
    assert Forest.from_nodes([-1, 0, 0], [[1, 2], [3], [4]]).rollout_of_trajectory.tolist() == [0, 1]


def test_streams_of_a_teacher_are_filled_up_to_the_widest():
    first = Trajectory([1, 2], teacher_ids=[[1], [2]], teacher_logprobs=[[-1.0], [-2.0]])
    second = Trajectory([1, 3], teacher_ids=[[4, 5], [6, 7]], teacher_logprobs=[[-1.0, -2.0], [-3.0, -np.inf]])
    forest = Forest.from_trajectories([first, second])
    ids, logprobs = forest.flat_stream("teacher_ids"), forest.flat_stream("teacher_logprobs")
    assert ids.tolist() == [[1, 0], [2, 0], [4, 5], [6, 7]]
    assert logprobs.tolist() == [[-1, -np.inf], [-2, -np.inf], [-1, -2], [-3, -np.inf]]
    with pytest.raises(DataError, match="trajectory 1: no teacher_ids"):
        Forest.from_trajectories([first, Trajectory([1, 2])]).flat_stream("teacher_ids")


def test_declared_nodes_carry_every_stream():
    streams = {
        name: [[0.0, number + 1.0], [number + 2.0]]
        for number, name in enumerate(("old_logprobs", "ref_logprobs", "sampler_logprobs"))
    }
    forest = Forest.from_nodes([-1, 0], [[1, 2], [3]], **streams, advantages=[np.float32(0.5), 2])
    (item,) = forest.trajectories
    assert item.advantages.tolist() == [0.5, 0.5, 2]
    assert [getattr(item, name).tolist() for name in streams] == [[0, 1, 2], [0, 2, 3], [0, 3, 4]]


def test_an_unknown_weighting_is_refused():
    forest = Forest.from_trajectories([Trajectory([1, 2])])
    for method in (forest.token_weights, forest.flat_weights):
        with pytest.raises(ConfigError, match="weighting='twice' is unknown"):
            method("twice")


# -- several forests ------------------------------------------------------------------------------------------------


@given(trajectories(max_sequences=4), trajectories(max_sequences=4), trajectories(max_sequences=2))
def test_concatenation_puts_forests_side_by_side(first, second, third):
    parts = [Forest.from_trajectories(items) for items in (first, second, third)]
    whole = Forest.concatenate(parts)
    shift = np.cumsum([0] + [part.num_tokens for part in parts])
    seen = np.zeros((whole.num_tokens, whole.num_tokens), dtype=bool)
    for part, low in zip(parts, shift, strict=False):
        seen[low : low + part.num_tokens, low : low + part.num_tokens] = is_above(part.parent)
    np.testing.assert_array_equal(is_above(whole.parent), seen)
    for name in ("token_ids", "depth", "multiplicity"):
        np.testing.assert_array_equal(getattr(whole, name), np.concatenate([getattr(part, name) for part in parts]))
    paths = [path + low for part, low in zip(parts, shift, strict=False) for path in part.paths]
    assert [path.tolist() for path in whole.paths] == [path.tolist() for path in paths]
    assert whole.trajectories == (*first, *second, *third)
    assert whole.num_trees == sum(part.num_trees for part in parts)
    assert whole.num_tree_pairs == sum(part.num_tree_pairs for part in parts)
    for name in STREAMS:
        np.testing.assert_array_equal(
            whole.flat_stream(name), np.concatenate([part.flat_stream(name) for part in parts])
        )


def test_bad_inputs_are_named():
    with pytest.raises(DataError, match="at least one trajectory"):
        Forest.from_trajectories([])
    with pytest.raises(DataError, match="trajectory 1 is a list"):
        Forest.from_trajectories([Trajectory([1, 2]), [1, 2]])
    with pytest.raises(DataError, match="no forest given"):
        Forest.concatenate([])


# -- extremes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_comb_of_100_000_forks():
    depth = 100_000
    spine = [-1, *range(depth - 1)]  # one token each; from every one hangs a leaf
    parents = np.array(spine + list(range(depth)))
    token_ids = [np.array([1, 1]), *np.ones((depth - 1, 1), dtype=int), *np.full((depth, 1), 2)]
    forest = Forest.from_nodes(parents, token_ids)
    assert forest.num_tokens == 2 * depth + 1
    assert forest.num_trajectories == depth
    assert forest.num_flat_tokens == sum(range(3, depth + 3))
    assert forest.depth.max() == depth + 1
    assert forest.tree_streams  # five billion flat tokens
    assert len(forest.trajectories) == depth
    assert forest.trajectories[7].token_ids.tolist() == [1] * 9 + [2]
    assert [item.source for item in forest.trajectories[-2:]] == [
        f"declared tree, node {2 * depth - n}" for n in (2, 1)
    ]
    assert forest.multiplicity[0] == depth
    np.testing.assert_array_equal(forest.multiplicity[: depth + 1], [depth, *range(depth, 0, -1)])
    assert forest.paths[7].tolist() == [*range(9), forest.ends[7]]
    assert forest.token_weights("once").sum() == forest.num_tokens - 1
    assert forest.token_weights().sum() == forest.num_flat_tokens - depth
    with pytest.raises(DataError, match=r"5,000,250,000 flat tokens .* use forest.paths"):
        _ = forest.path_index


@pytest.mark.exhaustive
def test_100_000_leaves_of_one_fork():
    leaves = 100_000
    forest = Forest.from_nodes([-1] + [0] * leaves, [[1, 2], *np.arange(leaves)[:, None]])
    assert forest.num_tokens == leaves + 2
    assert forest.num_flat_tokens == 3 * leaves
    assert forest.multiplicity[:3].tolist() == [leaves, leaves, 1]
    assert forest.token_ids[forest.paths[31_415]].tolist() == [1, 2, 31_415]


def test_one_path_of_a_million_tokens():
    length = 1_000_000
    forest = Forest.from_trajectories([Trajectory(np.arange(length)), Trajectory(np.arange(length // 2))])
    assert forest.num_tokens == length
    assert forest.num_tree_pairs == length * (length + 1) // 2
    assert forest.leaf_ratio == 1
    assert len(forest.segments.start) == 2
    np.testing.assert_array_equal(forest.parent, np.arange(-1, length - 1))
    np.testing.assert_array_equal(forest.paths[1], np.arange(length // 2))


@pytest.mark.exhaustive
def test_100_000_short_trajectories():
    rng = random.Random(0)
    sequences = [[7, *(rng.randrange(9) for _ in range(rng.randrange(1, 8)))] for _ in range(100_000)]
    weights = {n: np.array([0] + [1] * (n - 1), dtype=np.float32) for n in range(2, 9)}
    forest = Forest.from_trajectories([Trajectory(ids, loss_weights=weights[len(ids)]) for ids in sequences])
    assert forest.num_tokens == len({tuple(ids[:n]) for ids in sequences for n in range(1, len(ids) + 1)})
    assert forest.multiplicity[0] == 100_000
    assert forest.token_ids[forest.path_index].tolist() == [token for ids in sequences for token in ids]


def test_flat_pairs_beyond_64_bits_are_exact(monkeypatch):
    length = 3_000_000_000  # tokens of one declared trajectory, none of them made
    forest = Forest.from_trajectories([Trajectory([1, 2])])
    monkeypatch.setattr(treewise.tree.forest.Forest, "path_lengths", np.array([length] * 5))
    assert forest.num_flat_pairs == 5 * (length * (length + 1) // 2)
