"""Shares of a step: terms, denominators and gradients add up to those of one process, for any objective's weights."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.distributed.placement import CostModel, assign_ranks, rank_part, restrict_forest
from treewise.testing.strategies import forests
from treewise.tree.forest import WEIGHTINGS, Forest
from treewise.tree.trajectory import Trajectory

COST = CostModel(1.0, 0.01, 0.0)


@st.composite
def subsets(draw):
    """A forest, and some of its trajectories; half of the forests with rollouts of several trajectories."""
    forest = draw(forests())
    if draw(st.booleans()):
        for item in forest.trajectories:
            object.__setattr__(item, "rollout", draw(st.integers(0, 2)))
    chosen = draw(st.lists(st.booleans(), min_size=forest.num_trajectories, max_size=forest.num_trajectories))
    return forest, np.flatnonzero(chosen)


def shape(forest):
    return [forest.token_ids[path].tolist() for path in forest.paths]


@given(subsets(), st.sampled_from(WEIGHTINGS))
def test_a_part_is_the_tree_of_its_trajectories(subset, weighting):
    forest, chosen = subset
    if len(chosen) == 0:
        return
    part = restrict_forest(forest, chosen, weighting)
    again = Forest.from_trajectories(part.trajectories)
    assert shape(part) == [forest.trajectories[index].token_ids.tolist() for index in chosen]
    assert part.num_tokens >= again.num_tokens  # trees side by side are not merged with one another
    if forest.num_trees == 1 or again.num_trees == part.num_trees:
        assert part.num_tokens == again.num_tokens
    assert (part.subtree_end > np.arange(part.num_tokens)).all()
    np.testing.assert_array_equal(part.multiplicity, np.bincount(part.path_index, minlength=part.num_tokens))


@given(subsets(), st.sampled_from(WEIGHTINGS))
def test_every_token_of_a_part_weighs_what_it_did(subset, weighting):
    forest, chosen = subset
    if len(chosen) == 0:
        return
    part = restrict_forest(forest, chosen, weighting)
    whole = np.split(forest.flat_weights(weighting), forest.path_offsets[1:-1])
    expected = np.concatenate([whole[index] for index in chosen])
    np.testing.assert_allclose(part.flat_weights(weighting), expected, rtol=3e-7, atol=0)


@given(st.lists(forests(), min_size=1, max_size=3), st.integers(1, 4), st.sampled_from(WEIGHTINGS))
def test_denominators_add_up(some, num_ranks, weighting):
    placed = assign_ranks(some, num_ranks, COST, split="trajectories")
    shares = [rank_part(some, placed, rank, weighting) for rank in range(num_ranks)]
    found = math.fsum(forest.token_weights(weighting).sum() for share in shares for forest in share)
    expected = math.fsum(forest.token_weights(weighting).sum() for forest in some)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_tree_that_is_kept_whole_is_the_same_object():
    tree = Forest.from_trajectories([Trajectory([1, 2, 3]), Trajectory([1, 2, 4])])
    assert restrict_forest(tree, np.arange(2), "once") is tree


def test_trajectories_whose_weights_do_not_change_are_the_same_objects():
    tree = Forest.from_trajectories([Trajectory([1, 2, 3]), Trajectory([1, 2, 4]), Trajectory([5, 6])])
    assert restrict_forest(tree, np.array([0, 2])).trajectories == (tree.trajectories[0], tree.trajectories[2])
    once = restrict_forest(tree, np.array([0, 2]), "once").trajectories
    assert once[1] is tree.trajectories[2]
    np.testing.assert_array_equal(once[0].loss_weights, [0, 0.5, 1])


def test_a_parted_rollout_knows_what_it_weighs_as_a_whole():
    rows = [Trajectory([1, 2, 3], rollout="a"), Trajectory([1, 2, 4, 5], rollout="a"), Trajectory([1, 7], rollout="b")]
    tree = Forest.from_trajectories(rows)
    part = restrict_forest(tree, np.array([0, 2]))
    assert [item.rollout_weight for item in part.trajectories] == [5.0, None]
    scaled = restrict_forest(tree, np.array([0, 2]), "once")
    # Row 0 weighs 1.5 of now 1.5 + 2.5: its share of the rollout is 2 / 5 either way.
    assert scaled.trajectories[0].loss_weights.sum() / scaled.trajectories[0].rollout_weight == pytest.approx(2 / 5)


def large_declared(monkeypatch):
    """A declared tree that counts as too large to be held flat."""
    monkeypatch.setattr("treewise.tree.forest.MAX_FLAT_TOKENS", 5)
    tree = Forest.from_nodes([-1, 0, 0, 1], [[1, 2], [3, 4], [5], [6, 7]], loss_weights=[[0, 1], [1, 0], [2], [1, 1]])
    assert tree.tree_streams
    monkeypatch.undo()
    return tree


def test_large_declared_trees_are_cut_too(monkeypatch):
    tree = large_declared(monkeypatch)
    parts = [restrict_forest(tree, np.array([index])) for index in range(tree.num_trajectories)]
    assert sorted(tuple(part.token_ids.tolist()) for part in parts) == [(1, 2, 3, 4, 6, 7), (1, 2, 5)]
    total = sum(part.token_weights().sum() for part in parts)
    assert total == tree.token_weights().sum()
    once = [restrict_forest(tree, np.array([index]), "once") for index in range(tree.num_trajectories)]
    assert sum(part.token_weights().sum() for part in once) == tree.token_weights("once").sum()


@pytest.mark.representatives("per_trajectory")
@pytest.mark.parametrize("weighting", ["per_trajectory", "once"])
def test_gradients_of_all_ranks_add_up_to_those_of_one_process(weighting):
    from treewise.engine.engine import TreeEngine
    from treewise.objectives import SFT
    from treewise.testing.families import tiny_model
    from treewise.testing.oracle import flat_sft, gradient_error, gradients_of

    rng = np.random.default_rng(0)
    head = rng.integers(0, 50, 12).tolist()
    cuts = rng.integers(2, 13, 10)
    rows = [Trajectory([*head[: int(cut)], *rng.integers(0, 50, 9).tolist()]) for cut in cuts]
    some = [Forest.from_trajectories(rows[:6]), Forest.from_trajectories(rows[6:])]
    model = tiny_model("qwen3").double()
    engine, objective = TreeEngine(model, 24), SFT(weighting=weighting)
    engine.step(some)
    whole = gradients_of(model)
    model.zero_grad()
    alone = engine.step(some, objective)
    expected = gradients_of(model)
    model.zero_grad()
    # The model's norms compute in float32, where a shared token's gradient is rounded in parts, as in flat training.
    flat_sft(model, rows)
    rounding = gradient_error(gradients_of(model), whole)
    model.zero_grad()
    placed = assign_ranks(some, 3, COST, max_tokens=24)
    shares = [rank_part(some, placed, rank, weighting) for rank in range(3)]
    assert sum(len(share) for share in shares) > 2  # something is cut
    denominator = math.fsum(objective.denominator(forest) for share in shares for forest in share)
    loss = math.fsum(engine.step(share, objective, denominator=denominator).loss for share in shares if share)
    assert loss == pytest.approx(alone.loss, rel=1e-7)
    # The weights of cut trees are float32 under `once`.
    assert gradient_error(gradients_of(model), expected) < 5 * rounding + (1e-7 if weighting == "once" else 0)
    assert rounding < 1e-6
