import json

import pytest

from treewise.data import load_trees, mix, split_for_evaluation
from treewise.data.mixtures import parts_of
from treewise.data.raw import is_part
from treewise.errors import ConfigError, DataError

ROWS = [{"token_ids": [1, 2, index], "group": f"g{index % 20}"} for index in range(40)]


def test_no_group_is_on_both_sides():
    trees = load_trees(ROWS)
    train, evaluation = split_for_evaluation(trees, 0.1)
    assert (len(train), len(evaluation)) == (18, 2)
    assert set(train.names) | set(evaluation.names) == set(trees.names)
    assert not set(train.names) & set(evaluation.names)
    assert train.fingerprint != evaluation.fingerprint


def test_copies_of_a_mixture_stay_on_one_side():
    train, evaluation = split_for_evaluation(mix([load_trees(ROWS), load_trees(ROWS[:20])], [2, 1]), 0.2)
    assert not set(train.names) & set(evaluation.names)
    assert len(train) + len(evaluation) == 60


def test_weights_are_numbers_of_copies():
    mixed = load_trees([{"data": ROWS, "weight": 1.5}, {"data": ROWS[:4], "weight": 0.5}])
    assert len(mixed) == 30 + 2
    assert {mixed.names.count(name) for name in set(mixed.names)} <= {1, 2, 3}
    assert [tree.name for tree in mixed] == list(mixed.names)


def test_a_part_without_a_weight_is_in_a_mixture_once(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert len(load_trees([{"path": tmp_path / "rows.jsonl"}, {"data": ROWS[:4], "weight": 2}])) == 20 + 8


@pytest.mark.parametrize("weights", [[0, 1], [1], [float("nan"), 1], ["2", 1], [1e12, 1]])
def test_bad_weights_are_errors(weights):
    with pytest.raises(ConfigError):
        mix([load_trees(ROWS), load_trees(ROWS)], weights)


@pytest.mark.parametrize("fraction", [0, 1, 2, "a", True])
def test_bad_fractions_are_errors(fraction):
    with pytest.raises(ConfigError, match="eval_split"):
        split_for_evaluation(load_trees(ROWS), fraction)


def test_data_sets_as_axolotl_names_them_say_what_is_not_read() -> None:
    assert parts_of([{"path": "a.jsonl"}, {"path": "b.jsonl", "weight": 2}]) == [("a.jsonl", 1.0), ("b.jsonl", 2)]
    with pytest.raises(DataError, match=r"data\[1\] has 'split', 'type', which nothing reads; leave it out"):
        parts_of(["a.jsonl", {"path": "b.jsonl", "type": "chat_template", "split": "train"}])
    assert not is_part({"path": "a.png", "messages": []})
