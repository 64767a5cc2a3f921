"""Prefixes are merged by token and route: held against the set of all prefixes of pairs, whatever the order."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.errors import DataError
from treewise.testing.strategies import token_lists
from treewise.tree import routes
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


def routed(tokens, experts, group="g", **labels):
    """A trajectory of one layer and one expert a token."""
    table = None if experts is None else [[[each]] for each in experts]
    return Trajectory(tokens, routed_experts=table, group=group, **labels)


@st.composite
def routed_trajectories(draw, unknown=True):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    items = []
    for tokens in draw(token_lists(vocab_size=2)):
        table = np.sort(rng.integers(0, 2, (len(tokens), 1, 2)) + np.array([0, 2]), axis=-1)
        if unknown:
            table[rng.random(len(tokens)) < rng.choice([0, 0.3, 1])] = -1
        items.append(Trajectory(tokens, routed_experts=table, group="g"))
    return items


def pairs(item):
    table = item.routed_experts if item.routed_experts is not None else np.full((len(item), 1, 1), -1)
    return [
        (token, *row) for token, row in zip(item.token_ids.tolist(), table.reshape(len(item), -1).tolist(), strict=True)
    ]


@given(routed_trajectories(unknown=False))
def test_tokens_are_shared_exactly_where_all_tokens_and_routes_so_far_are(items):
    forest = Forest.from_trajectories(items)
    prefixes = {tuple(pairs(item)[:length]) for item in items for length in range(1, len(item) + 1)}
    assert forest.num_tokens == len(prefixes)
    for item, path in zip(items, forest.paths, strict=True):
        assert np.array_equal(forest.routed_experts[path], item.routed_experts)
        assert np.array_equal(forest.token_ids[path], item.token_ids)


@given(routed_trajectories(), st.randoms(use_true_random=False))
def test_what_was_not_recorded_merges_and_no_record_is_lost_in_any_order(items, shuffled: random.Random):
    forest = Forest.from_trajectories(items)
    for item, path in zip(items, forest.paths, strict=True):
        if item.routed_experts is not None:
            is_known = item.routed_experts[:, 0, 0] >= 0
            assert np.array_equal(forest.routed_experts[path][is_known], item.routed_experts[is_known])
        assert np.array_equal(forest.token_ids[path], item.token_ids)
    blank = [replace(item, routed_experts=None) for item in items]
    assert Forest.from_trajectories(blank).num_tokens <= forest.num_tokens
    order = shuffled.sample(range(len(items)), len(items))
    again = Forest.from_trajectories([items[index] for index in order])
    assert again.num_tokens == forest.num_tokens
    for index, path in zip(order, again.paths, strict=True):
        assert np.array_equal(again.routed_experts[path], forest.routed_experts[forest.paths[index]])


def test_a_token_without_a_record_goes_with_most_of_the_others():
    items = [routed([1, 2, 3], [0, 1, 1]), routed([1, 2, 4], [0, 2, 2]), routed([1, 2, 5], [0, 2, 1])]
    forest = Forest.from_trajectories([*items, routed([1, 2, 6], [0, -1, 3]), routed([1, 2, 3], None)])
    seconds = [int(path[1]) for path in forest.paths]
    assert [each == seconds[0] for each in seconds] == [True, False, False, False, False]
    assert [item.routed_experts[1, 0, 0] for item in forest.trajectories] == [1, 2, 2, 2, 2]


def test_no_experts_are_taken_from_another_tree():
    items = [routed([1, 2, 3], [0, 1, 1]), routed([1, 2, 3], None)]
    assert Forest.from_trajectories(items).num_tokens == 3
    apart = Forest.from_trajectories(items, tree_of=[0, 1])
    assert apart.num_tokens == 6
    assert apart.trajectories[1].routed_experts is None


@given(routed_trajectories())
def test_without_a_group_no_experts_depend_on_what_else_is_there(items):
    alone = [replace(item, group=number % 2 or None, rollout=number) for number, item in enumerate(items)]
    forest = Forest.from_trajectories(alone)
    of_group = Forest.from_trajectories([item for item in alone if item.group is not None] or alone)
    taken = {item.rollout: item.routed_experts for item in of_group.trajectories}
    for item, found in zip(alone, forest.trajectories, strict=True):
        own = item.routed_experts if item.group is None else taken[item.rollout]
        assert np.array_equal(found.routed_experts, own)
        path = forest.paths[item.rollout]
        assert np.array_equal(forest.routed_experts[path], own)


def test_by_tokens_all_take_the_experts_of_the_first():
    items = [routed([1, 2, 3], [0, -1, 1]), routed([1, 2, 3, 4], [1, 2, 2, 0]), routed([1, 2, 5], [2, 3, -1])]
    taken = routes.by_tokens(items)
    assert [item.routed_experts[:, 0, 0].tolist() for item in taken] == [[0, 2, 1], [0, 2, 1, 0], [0, 2, -1]]
    assert (
        Forest.from_trajectories(taken).num_tokens
        == Forest.from_trajectories([replace(item, routed_experts=None) for item in items]).num_tokens
    )
    assert routes.by_tokens([routed([1, 2], None)])[0].routed_experts is None


def test_declared_siblings_with_other_routes_stay_apart():
    experts = [[[[0]], [[1]]], [[[1]]], [[[2]]], [[[1]]]]
    forest = Forest.from_nodes([-1, 0, 0, 0], [[1, 2], [3], [3], [3]], routed_experts=experts)
    assert forest.num_tokens == 4
    assert forest.routed_experts[:, 0, 0].tolist() == [0, 1, 1, 2]
    partly = Forest.from_nodes([-1, 0], [[1, 2], [3]], routed_experts=[None, [[[2]]]])
    assert partly.routed_experts[:, 0, 0].tolist() == [-1, -1, 2]


def test_rows_of_two_models_are_an_error_that_names_them():
    items = [
        routed([1, 2], [0, 1], source="a:1"),
        Trajectory([1, 2], routed_experts=[[[0, 1]], [[0, 1]]], source="a:2"),
    ]
    with pytest.raises(DataError, match=r"a:2: routed_experts of \[1, 2\] layers and experts, and of \[1, 1\] in a:1"):
        Forest.from_trajectories(items)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[0, 1]] * 3, r"shape \(3, 2\); give \[3, layers, experts\]"),
        ([[[0]]] * 5, r"shape \(5, 1, 1\)"),
        ([[[0]], [[1]], [[0.5]]], "must be integers"),
        ([[[0], [1]], [[0], [1]], [[0], [-2]]], r"\[2\] layer 1: expert -2 is none"),
        ([[[0, 1]], [[2, 2]], [[0, 1]]], r"\[1\] layer 0: expert 2 twice"),
        ([[[0, 1]], [[0, 0]], [[0, 1]]], "A row of zeros is how verl"),
        ([[[0], [1]], [[0], [-1]], [[0], [1]]], r"\[1\] layer 1: -1 beside recorded experts"),
        ([[[0, 1]], [[0]], [[0, 1]]], "tables of several sizes"),
    ],
)
def test_experts_that_no_router_can_have_chosen_are_named(values, message):
    with pytest.raises(DataError, match=message):
        Trajectory([1, 2, 3], routed_experts=values, source="rows.jsonl:1")


def test_experts_are_sorted_the_last_row_may_be_missing_and_layers_of_zeros_have_no_router():
    item = Trajectory([1, 2, 3], routed_experts=[[[0, 0], [3, 1]], [[0, 0], [0, 2]]])
    assert item.routed_experts.tolist() == [[[-1, -1], [1, 3]], [[-1, -1], [0, 2]], [[-1, -1], [-1, -1]]]
    assert item.routed_experts.dtype == np.int16
