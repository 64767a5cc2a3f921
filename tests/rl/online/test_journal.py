"""Answers are recorded as they come, given again in order, and computed again where the record ends or differs."""

import logging

import numpy as np

from treewise.rl.online.journal import Journal, completion_from_json, completion_to_json
from treewise.rl.samplers import Completion


def test_a_line_that_was_cut_off_is_computed_again(tmp_path):
    path = tmp_path / "journal" / "iteration-00001.jsonl"
    journal = Journal(path)
    for number in range(3):
        assert journal.once("n", number, lambda n=number: [n, 0.1]) == [number, 0.1]
    path.write_bytes(path.read_bytes()[:-5])
    again = Journal(path)
    answers = [again.once("n", number, lambda n=number: [n, 0.2]) for number in range(3)]
    assert answers == [[0, 0.1], [1, 0.1], [2, 0.2]]
    assert again.num_replayed == 2
    assert len(path.read_text().splitlines()) == 3


def test_another_question_is_computed_and_what_follows_is_dropped(tmp_path, caplog):
    path = tmp_path / "iteration-00001.jsonl"
    journal = Journal(path)
    for number in range(3):
        journal.once("n", number, lambda n=number: n)
    again = Journal(path)
    with caplog.at_level(logging.WARNING):
        answers = [again.once("n", number, lambda n=number: 10 + n) for number in (0, 5, 2)]
    assert answers == [0, 15, 12]
    assert "computed again" in caplog.text
    assert Journal(path).once("n", 0, lambda: 99) == 0


def test_completions_survive_bit_for_bit():
    rng = np.random.default_rng(0)
    given = Completion(
        token_ids=np.array([3, 4], dtype=np.int32),
        logprobs=-rng.exponential(size=2).astype(np.float32),
        finish_reason="stop",
        continuation=7,
        entropies=rng.random(2).astype(np.float32),
        top_ids=np.array([[1, 2], [3, 4]], dtype=np.int32),
        top_logprobs=-rng.random((2, 2)).astype(np.float32),
    )
    again = completion_from_json(completion_to_json(given))
    for name in ("token_ids", "logprobs", "entropies", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(again, name), getattr(given, name))
        assert getattr(again, name).dtype == getattr(given, name).dtype
    assert (again.finish_reason, again.continuation, again.log_kept_mass) == ("stop", 7, None)
