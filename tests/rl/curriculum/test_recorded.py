"""Signals of recorded trees against what the rows say; orders with the probabilities of their rules, also restored."""

import itertools
import json

import numpy as np
import pytest

from treewise import TreeEngine
from treewise.errors import CheckpointError, ConfigError, DataError
from treewise.rl.curriculum import curriculum_named
from treewise.rl.curriculum.recorded import (
    ORDERS,
    RecordedOrder,
    check_on_trees,
    learnabilities,
    outcomes_of,
    prompt_of,
    waiting_times,
)
from treewise.rl.curriculum.self_check import SIGNAL_OF
from treewise.rl.curriculum.signals import gradient_norms
from treewise.testing import tiny_model
from treewise.tree.trajectory import Trajectory

SCORES = {"angle": np.array([0.1, 0.9, 0.5, 0.7]), "learnability": np.array([0.25, 0.0, 0.1, 0.2])}


def row(ids, num_prompt, reward=None, rollout=None):
    weights = [0.0] * num_prompt + [1.0] * (len(ids) - num_prompt)
    return Trajectory(ids, loss_weights=weights, reward=reward, rollout=rollout)


def test_a_prompt_ends_before_the_first_trained_token():
    tree = [row([1, 2, 3, 4, 5], 4), row([1, 2, 9], 2)]
    assert prompt_of(tree).tolist() == [1, 2]
    assert prompt_of([Trajectory([4, 5])]).tolist() == [4]


def test_outcomes_count_rollouts_and_not_rows():
    tree = [row([1, 2, 3], 1, 1.0, "a"), row([1, 2, 4], 1, 1.0, "a"), row([1, 2, 5], 1, 0.0, "b")]
    assert outcomes_of(tree, 0.5) == [True, False]
    assert learnabilities([tree], 0.5) == pytest.approx(0.25)
    all_right = [row([1, 2], 1, 1.0, str(number)) for number in range(6)]
    assert learnabilities([all_right], 0.5) == pytest.approx(7 / 8 / 8)
    with pytest.raises(DataError, match="tree 1: no reward"):
        learnabilities([tree, [row([1, 2], 1)]], 0.5)


def test_the_second_half_is_the_target():
    rng = np.random.default_rng(0)
    trees = [
        [row([number, *rng.integers(1, 16, 4)], 2, float(rng.random() < 0.5), f"{k}") for k in range(4)]
        for number in range(1, 7)
    ]
    engine = TreeEngine(tiny_model(vocab_size=16))
    seen = []

    def prepared(rows):
        seen.append(rows)
        return rows

    found = check_on_trees(trees, engine, None, prepared)
    assert seen == [tree[1::2] for tree in trees]
    norms = gradient_norms(engine, seen, None)
    assert found.claimed("angle").target == "gradient_norm"
    assert found.num_tasks == len(norms) == 6
    assert found.num_rollouts == 24
    variances = [np.var([each.reward for each in rows], ddof=1) for rows in seen]
    assert {check.target for check in found.checks} == {"gradient_norm", "variance"}
    assert len(set(variances)) <= 2


def new_order(name, scores=None, seed=0, **settings):
    known = SCORES if scores is None else scores
    return RecordedOrder(curriculum_named(name, **settings), 4, seed, lambda: known[SIGNAL_OF[name]])


@pytest.mark.parametrize("name", ORDERS)
def test_every_tree_once_an_epoch_and_the_same_after_a_restore(name):
    order = new_order(name)
    order.begin()
    orders = [order.order(epoch).tolist() for epoch in range(20)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in orders)
    assert len({tuple(each) for each in orders}) > 1
    assert name != "learnability" or {each[-1] for each in orders} == {1}  # of weight 0
    again = RecordedOrder(curriculum_named(name), 4, 0, pytest.fail)
    again.restore(json.loads(json.dumps(order.state())))
    again.begin()  # measures nothing
    assert [again.order(epoch).tolist() for epoch in range(20)] == orders


def test_learnability_draws_one_after_another():
    weights = SCORES["learnability"]
    drawn = [tuple(np.argsort(waiting_times(weights, np.random.default_rng(number)))) for number in range(2000)]
    assert all(each[3] == 1 for each in drawn)  # of weight 0
    total = weights.sum()
    for first, second in itertools.permutations((0, 2, 3), 2):
        expected = weights[first] / total * weights[second] / (total - weights[first])
        assert sum(each[:2] == (first, second) for each in drawn) / 2000 == pytest.approx(expected, abs=0.035)


def test_gain_is_the_ranks_where_it_is_narrow():
    order = new_order("gain", width=1e-9)
    order.begin()
    assert order.order(0).tolist() == order.order(1).tolist() == [1, 3, 2, 0]
    shuffled = [tuple(new_order("gain-shuffled", seed=seed, width=1e-9).order(0)) for seed in range(10)]
    assert len(set(shuffled)) > 2


def test_what_is_refused():
    with pytest.raises(ConfigError, match="'dynamic' chooses what to sample next"):
        RecordedOrder(curriculum_named("dynamic"), 4, 0, dict)
    with pytest.raises(ConfigError, match="thompson draws what to sample next"):
        RecordedOrder(curriculum_named("learnability", thompson=True), 4, 0, dict)
    with pytest.raises(CheckpointError, match="not the state of a curriculum"):
        new_order("gain").restore({})
    with pytest.raises(CheckpointError, match="2 values of angle for 4 trees"):
        new_order("gain").restore({"angle": [1.0, 2.0]})
