"""Signals of recorded trees against what the rows say."""

import numpy as np
import pytest

from treewise import TreeEngine
from treewise.errors import DataError
from treewise.rl.curriculum.gradient_norms import gradient_norms
from treewise.rl.curriculum.recorded import check_on_trees, learnabilities, outcomes_of, prompt_of
from treewise.testing import tiny_model
from treewise.tree.trajectory import Trajectory


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
