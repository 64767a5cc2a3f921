import gzip
import json

import numpy as np
import pytest

from treewise.data import load_trees
from treewise.errors import DataError
from treewise.tree.prefix_merge import common_prefix


def recorded_rows(path):
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_recorded_rows_merge_to_the_recorded_sizes(fixtures):
    path = fixtures / "tokens.jsonl.gz"
    expected = [row["expect"] for row in recorded_rows(path)]
    for tree, sizes in zip(load_trees(path), expected, strict=True):
        forest = tree.forest()
        found = {
            "n_seq": len(tree.trajectories),
            "flat": forest.num_flat_tokens,
            "unique": forest.num_tokens,
            "loss_flat": sum(item.num_trained_tokens for item in tree.trajectories),
            "max_len": max(map(len, tree.trajectories)),
        }
        assert found == {name: sizes[name] for name in found}
        assert forest.leaf_ratio == pytest.approx(sizes["leaf_flat"] / sizes["unique"])
        assert forest.pair_ratio == pytest.approx(sizes["pairs_flat"] / sizes["pairs_tree"])


def test_behaviour_logprobs_align_with_trained_tokens(fixtures):
    rows = recorded_rows(fixtures / "tokens.jsonl.gz")
    [recorded] = [row for row in rows if "behaviour_logprobs" in row["seqs"][0]]
    [tree] = [tree for tree in load_trees(fixtures / "tokens.jsonl.gz") if tree.name == recorded["group"]]
    for trajectory, seq in zip(tree.trajectories, recorded["seqs"], strict=True):
        trained = trajectory.loss_weights > 0
        assert trajectory.old_logprobs is None  # the sampler's are not the policy's
        assert np.allclose(trajectory.sampler_logprobs[trained], seq["behaviour_logprobs"])
        assert not trajectory.sampler_logprobs[~trained].any()


def test_streams_labels_and_groups_of_a_row_arrive(write):
    rows = [
        {
            "token_ids": [1, 2, 3],
            "loss_weights": [0, 1, 0.5],
            "advantages": 0.25,
            "old_logprobs": [None, -1, -2],
            "ref_logprobs": [0, -3, -4],
            "group": 7,
            "reward": 1,
            "rollout": "r",
        },
        {"token_ids": [9, 9], "group": "7"},
        {"token_ids": [1, 2, 4], "group": 7},
    ]
    dataset = load_trees(path := write(*rows))
    assert [len(tree.trajectories) for tree in dataset] == [2, 1]
    first = dataset[0].trajectories[0]
    assert first.advantages.tolist() == [0.25] * 3
    assert first.old_logprobs.tolist() == [0, -1, -2]
    assert first.ref_logprobs.tolist() == [0, -3, -4]
    assert (first.group, first.reward, first.rollout, first.source) == (7, 1.0, "r", f"{path}:1")
    assert dataset[0].num_records == 2


def test_the_fingerprint_follows_the_content_and_not_the_place(write):
    row = {"token_ids": [1, 2, 3], "rollout": "r"}
    first = load_trees(write(row, name="a.jsonl"))
    moved = load_trees(write("", row, name="b.jsonl"))
    changed = load_trees(write({**row, "loss_weights": [0, 1, 2]}, name="c.jsonl"))
    assert first.fingerprint == moved.fingerprint != changed.fingerprint


BAD_ROWS = [
    ({"token_ids": []}, ("empty",)),
    ({"token_ids": [4]}, ("one token only",)),
    ({"token_ids": [1, 2.5]}, ("integers", "float")),
    ({"token_ids": ["1", "2"]}, ("integers",)),
    ({"token_ids": [1, None]}, ("integers",)),
    ({"token_ids": [1, [2]]}, ("token_ids",)),
    ({"token_ids": 5}, ("token_ids",)),
    ({"token_ids": [1, -2]}, ("token id -2", "position 1")),
    ({"token_ids": [1, 2], "loss_weights": [1, 1]}, ("first token",)),
    ({"token_ids": [1, 2], "loss_weights": [0, 0]}, ("no trained token",)),
    ({"token_ids": [1, 2], "loss_weights": [0]}, ("1 loss_weights for 2 tokens",)),
    ({"token_ids": [1, 2], "loss_weights": 1}, ("loss_weights", "one per token")),
    ({"token_ids": [1, 2], "loss_weights": [0, -1]}, ("negative",)),
    ({"token_ids": [1, 2], "advantages": [float("inf"), 0]}, ("advantages[0] is inf",)),
    ({"token_ids": [1, 2], "advantages": [1]}, ("1 advantages for 2 tokens",)),
    ({"token_ids": [1, 2], "old_logprobs": [0, float("nan")]}, ("old_logprobs[1] is nan",)),
    ({"token_ids": [1, 2], "old_logprobs": [0, None]}, ("old_logprobs[1] is null", "trained")),
    ({"token_ids": [1, 2], "reward": "good"}, ("reward must be a number",)),
    ({"token_ids": [1, 2], "reward": float("nan")}, ("reward is nan",)),
    ({"token_ids": [1, 2], "group": [1]}, ("group must be",)),
    ({"token_ids": [1, 2], "rollout": {}}, ("rollout must be",)),
    ({"token_ids": [1, 2], "seqs": []}, ("several forms",)),
    ({"tokens": [1, 2]}, ("matches no form", "token_row")),
    ({"token_ids": [1, 2], "mask": [0, 1]}, ("mask is not a key", "write it as loss_weights", "treewise import")),
    ({"nodes": [{"token_ids": [1, 2], "mask": [False, True]}]}, ("nodes[0]: mask", "loss_weights")),
    ({"tokens": [1], "response_length": 1, "reward": 1, "prompt": "x"}, ("without completion", "slime's")),
    ({"tokens": [1, 2], "response_length": 1, "reward": 1}, ("matches no form", "slime's", "treewise import")),
    ({}, ("no keys",)),
    ({"seqs": []}, ("non-empty",)),
    ({"seqs": [{"ids": [1, 2]}]}, ("seqs[0]", "loss")),
    ({"seqs": [{"ids": [1, 2], "loss": [[1, 5]]}]}, ("seqs[0]", "[1, 5]", "<= 2")),
    ({"seqs": [{"ids": [1, 2, 3], "loss": [[2, 3], [1, 2]]}]}, ("seqs[0]", "[1, 2]")),
    ({"seqs": [{"ids": [1, 2], "loss": [[0, 2]]}]}, ("seqs[0]", "first token")),
    ({"seqs": [{"ids": [1, 2], "loss": []}]}, ("seqs[0]", "no trained token")),
    ({"seqs": [{"ids": [1, 2], "loss": [[1, 2]], "behaviour_logprobs": [1, 2, 3]}]}, ("3 behaviour_logprobs for 1",)),
    ({"messages": [{"role": "user", "content": "x"}]}, ("needs a tokenizer",)),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_bad_rows_are_refused_with_their_line(write, row, words):
    path = write({"token_ids": [1, 2]}, "", row)
    with pytest.raises(DataError) as caught:
        load_trees(path)
    for word in (f"{path}:3", *words):
        assert word in str(caught.value), str(caught.value)


def test_ids_beyond_the_vocabulary_are_named(write):
    path = write({"seqs": [{"ids": [1, 2, 3], "loss": [[1, 2]]}, {"ids": [1, 500, 3], "loss": [[1, 2]]}]})
    dataset = load_trees(path)
    dataset.check_vocabulary(501)
    with pytest.raises(DataError, match=r"jsonl:1: seqs\[1\]: token id 500 at position 1 is outside .* of 500"):
        dataset.check_vocabulary(500)


def test_recorded_drift_is_found_at_its_first_token(fixtures):
    recorded = json.loads(gzip.decompress((fixtures / "retokenization_drift.json.gz").read_bytes()))
    sampled, rendered = recorded["sampled_prefix_ids"], recorded["rerendered_next_prompt_ids"]
    at = common_prefix(np.array(sampled), np.array(rendered))
    assert at == next(i for i, (a, b) in enumerate(zip(sampled, rendered, strict=False)) if a != b)
    assert common_prefix(np.array(sampled), np.array(recorded["spliced_next_prompt_ids"])) == len(sampled)


def test_drift_between_ids_and_text_is_a_warning_and_the_ids_are_kept(write, tokenizer):
    messages = [{"role": "user", "content": "Name it."}, {"role": "assistant", "content": " Strawberry"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    head, tail = text.split(" Strawberry")
    parts = [head, " Stra", "wberry", tail]
    ids = [i for part in parts for i in tokenizer(part, add_special_tokens=False)["input_ids"]]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids != whole
    dataset = load_trees(write({"token_ids": ids, "messages": messages}), tokenizer)
    assert dataset[0].trajectories[0].token_ids.tolist() == ids
    assert len(dataset.report.warnings) == 1
    assert "retokenisation drift" in dataset.report.warnings[0]
    clean = load_trees(write({"token_ids": whole[:-1], "messages": messages}, name="b.jsonl"), tokenizer)
    assert clean.report.warnings == []


def test_log_probs_that_are_probabilities_are_said(write):
    row = {"token_ids": [1, 2, 3], "group": "a"}
    found = load_trees(write(row | {"old_logprobs": [0, 0.9, -1e-3]}, row | {"old_logprobs": [0, 1e-6, -1]}))
    [warning] = found.report.warnings
    assert "old_logprobs[1] is 0.9" in warning
