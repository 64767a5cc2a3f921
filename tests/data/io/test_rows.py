"""Rows as an Arrow table: nothing is lost in it, and the content hash depends on all that is trained; and in the cache,
where a change of what records are read as raises the number in its key.
"""

import hashlib
import json

import numpy as np
import pytest

from tests.data.readers.test_other_libraries import SAME
from treewise.data import RenderOptions, load_trees
from treewise.data.io import rows
from treewise.data.io.rows import content_hash, row_from_trajectory, rows_to_table, table_columns, trajectories_of
from treewise.tree.trajectory import STREAMS, Trajectory

ITEM = {
    **{"token_ids": [1, 2, 3], "advantages": 1, "old_logprobs": [0, -1, -2], "ref_logprobs": [0, -1, -3]},
    **{"sampler_logprobs": [0, -1, -4], "teacher_ids": [[1, 2]] * 3, "teacher_logprobs": [[-1, -2]] * 3},
    **{"group": "g", "reward": 1.0, "rollout": 7, "source": "a.jsonl:1"},
    "routed_experts": [[[0, 1], [2, 3]]] * 3,
}
OTHERS = {
    **{"token_ids": [1, 2, 4], "loss_weights": [0, 1, 0], "advantages": 2, "old_logprobs": [0, -1, -1]},
    **{"ref_logprobs": [0, -1, -1], "sampler_logprobs": [0, -1, -1], "teacher_ids": [[1, 3]] * 3},
    **{"teacher_logprobs": [[-1, -3]] * 3, "group": "h", "reward": 0.0, "rollout": 8},
    "routed_experts": [[[0, 1], [2, 4]]] * 3,
}


def hash_of(*items):
    found = [row_from_trajectory(Trajectory(**item)) for item in items]
    return content_hash(rows_to_table([0] * len(found), found), ["tree"])


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
        records = [row if rollout is None else {**row, "rollout": rollout} for rollout in rollouts]
        return load_trees(write(*records, name=name)).fingerprint

    apart, joined = fingerprint("a", "b", name="x.jsonl"), fingerprint("a", "a", name="x.jsonl")
    assert apart != joined
    assert fingerprint("c", "c", name="x.jsonl") == joined
    assert fingerprint(None, None, name="y.jsonl") == apart == fingerprint(None, None, name="x.jsonl")


# Raise `rows.READING` where this hash changes, and write the new one down.
READING, FINGERPRINTS = 4, "363892ac381968e1af789c8ca90b5233bc6962f78690bb2de15cd456903365b5"


def test_a_change_of_what_is_read_raises_the_number_of_reading(fixtures, tokenizer, qwen3_template):
    found = []
    for name in ("gsm8k", "nemo", "tau2_grok", "tau_airline", "tokens", "whowhen"):
        for template in ("chatml", qwen3_template):
            options = RenderOptions(chat_template=template, on_hidden="warn")
            found.append(load_trees(fixtures / f"{name}.jsonl.gz", tokenizer, options=options).fingerprint)
    for theirs, ours in SAME.values():
        for record in (theirs, ours):
            found.append(load_trees([record], tokenizer, options={"chat_template": "chatml"}).fingerprint)
    assert (rows.READING, hashlib.sha256("".join(found).encode()).hexdigest()) == (READING, FINGERPRINTS)


@pytest.mark.parametrize("change", ["READING", "__version__", "settings", "content", "name"])
def test_the_key_follows_the_version_the_settings_and_the_files(change, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"token_ids": [1, 2]}))
    before = rows.cache_key(["a"], [path])
    assert rows.cache_key(["a"], [path]) == before
    if change == "READING":
        monkeypatch.setattr(rows, change, rows.READING + 1)
    elif change == "__version__":
        monkeypatch.setattr(rows.treewise, change, "9.9.9")
    elif change == "content":
        path.write_text(json.dumps({"token_ids": [1, 3]}))
    elif change == "name":
        path = path.rename(tmp_path / "others.jsonl")
    assert rows.cache_key(["b" if change == "settings" else "a"], [path]) != before
