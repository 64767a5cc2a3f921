"""Rows as an Arrow table: nothing is lost in it, and the content hash depends on all that is trained."""

import numpy as np
import pytest

from treewise.data import load_trees
from treewise.data.io.rows import content_hash, row_from_trajectory, rows_to_table, table_columns, trajectories_of
from treewise.tree.trajectory import STREAMS, Trajectory

ITEM = {
    **{"token_ids": [1, 2, 3], "advantages": 1, "old_logprobs": [0, -1, -2], "ref_logprobs": [0, -1, -3]},
    **{"sampler_logprobs": [0, -1, -4], "teacher_ids": [[1, 2]] * 3, "teacher_logprobs": [[-1, -2]] * 3},
    **{"group": "g", "reward": 1.0, "rollout": 7, "source": "a.jsonl:1"},
}
OTHERS = {
    **{"token_ids": [1, 2, 4], "loss_weights": [0, 1, 0], "advantages": 2, "old_logprobs": [0, -1, -1]},
    **{"ref_logprobs": [0, -1, -1], "sampler_logprobs": [0, -1, -1], "teacher_ids": [[1, 3]] * 3},
    **{"teacher_logprobs": [[-1, -3]] * 3, "group": "h", "reward": 0.0, "rollout": 8},
}


def hash_of(*items):
    rows = [row_from_trajectory(Trajectory(**item)) for item in items]
    return content_hash(rows_to_table([0] * len(rows), rows), ["tree"])


def test_rows_come_back_from_a_table():
    item = Trajectory(**ITEM)
    [back] = trajectories_of(table_columns(rows_to_table([0], [row_from_trajectory(item)])))
    assert all(np.array_equal(getattr(back, name), getattr(item, name)) for name in ("token_ids", *STREAMS))
    labels = ("group", "reward", "rollout", "source")
    assert [getattr(back, name) for name in labels] == [getattr(item, name) for name in labels]


@pytest.mark.parametrize("name", OTHERS)
def test_the_hash_depends_on_every_stream_and_label(name):
    assert hash_of(ITEM, ITEM) != hash_of(ITEM, {**ITEM, name: OTHERS[name]})


def test_the_hash_depends_on_which_rows_are_one_rollout_and_not_on_its_name(write):
    row = {"token_ids": [1, 2, 3], "group": "g"}

    def fingerprint(*rollouts, name):
        rows = [row if rollout is None else {**row, "rollout": rollout} for rollout in rollouts]
        return load_trees(write(*rows, name=name)).fingerprint

    apart, joined = fingerprint("a", "b", name="x.jsonl"), fingerprint("a", "a", name="x.jsonl")
    assert apart != joined
    assert fingerprint("c", "c", name="x.jsonl") == joined
    assert fingerprint(None, None, name="y.jsonl") == apart == fingerprint(None, None, name="x.jsonl")
