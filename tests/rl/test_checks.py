"""Likely mistakes of an update on rollouts are found."""

import treewise as tw
from treewise.errors import num
from treewise.rl.checks import gap_warning, reward_like, trained_twice, warnings_of


def row(ids, reward=0.0, group="a", rollout=None):
    return tw.Trajectory(ids, group=group, reward=reward, rollout=rollout)


def test_positions_that_rows_of_one_rollout_train_twice_are_counted():
    trees = [[row([1, 2, 3, 4], rollout="r"), row([1, 2, 3, 5], rollout="r"), row([1, 2, 3, 6], rollout="s")]]
    assert trained_twice(trees) == 2
    assert "2 positions more than once" in warnings_of(trees, "per_trajectory")[0]
    assert warnings_of(trees, "per_rollout") == []


def test_a_wide_gap_warns():
    assert gap_warning(1.01) is None
    assert gap_warning(1.03, limit=1.05) is None
    assert "sampler_correction" in (gap_warning(1.01, limit=1.005) or "")
    assert "8,144" in (gap_warning(8144.0) or "")


def test_fields_that_could_be_rewards():
    record = {"final_score": 1, "Success": True, "grade": "A", "id": 3}
    assert reward_like(record) == ["final_score", "Success"]


def test_nouns_are_counted():
    assert [num(1, "tree"), num(2, "tree"), num(0, "batch", "batches")] == ["1 tree", "2 trees", "0 batches"]
