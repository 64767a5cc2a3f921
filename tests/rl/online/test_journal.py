"""Answers are recorded as they come, given again in order, and computed again where the record ends or differs."""

import logging

import numpy as np
import pytest

from tests.damage import damages
from treewise.errors import CheckpointError
from treewise.rl.online.journal import Journal, completion_from_json, completion_to_json, forget_foreign, journal_file
from treewise.rl.samplers import Completion


def once(journal, name, question, answer):
    """The answer that is recorded; else this one, which is recorded then."""
    found = journal.recall("n", str(name), question)
    if found is None:
        journal.record("n", [(str(name), question, answer)])
    return answer if found is None else found


def test_a_line_that_was_cut_off_is_computed_again(tmp_path):
    path = tmp_path / "journal" / "iteration-00001.jsonl"
    journal = Journal(path)
    for number in range(3):
        assert once(journal, number, number, [number, 0.1]) == [number, 0.1]
    path.write_bytes(path.read_bytes()[:-5])
    again = Journal(path)
    answers = [once(again, number, number, [number, 0.2]) for number in range(3)]
    assert answers == [[0, 0.1], [1, 0.1], [2, 0.2]]
    assert again.num_replayed == 2
    assert len(path.read_text().splitlines()) == 3


def test_damaged_lines_are_computed_again_with_a_warning(tmp_path, caplog):
    path = tmp_path / "iteration-00001.jsonl"
    journal = Journal(path)
    for number in range(4):
        once(journal, number, number, [number, 0.1])
    whole = path.read_text().splitlines(keepends=True)
    for how in damages(path):
        caplog.clear()
        if path.is_dir():
            with pytest.raises(CheckpointError, match=r"cannot be read .Is a directory.; remove it, and what it holds"):
                Journal(path)
            continue
        content = path.read_bytes()
        again = Journal(path)
        answers = [once(again, number, number, [number, 0.2]) for number in range(4)]
        sound = 0
        while sound < 4 and content.startswith("".join(whole[: sound + 1]).encode()):
            sound += 1
        assert answers == [[n, 0.1] for n in range(sound)] + [[n, 0.2] for n in range(sound, 4)], how
        rest = content[len("".join(whole[:sound])) :]
        assert [f":{sound + 1}: damaged (" in line for line in caplog.messages] == [True] * (b"\n" in rest), how
        assert len(path.read_text().splitlines()) == 4


def test_another_question_is_computed_and_the_others_keep_their_answers(tmp_path, caplog):
    path = tmp_path / "iteration-00001.jsonl"
    journal = Journal(path)
    for number in range(3):
        once(journal, number, number, number)
    again = Journal(path)
    with caplog.at_level(logging.WARNING):
        answers = [once(again, name, question, 10 + question) for name, question in enumerate((0, 5, 2))]
    assert answers == [0, 15, 2]
    assert "computed again" in caplog.text
    third = Journal(path)
    assert [once(third, name, question, 99) for name, question in enumerate((0, 5, 2))] == [0, 15, 2]


def test_a_batch_is_recorded_whole_or_not_at_all_and_recalled_in_any_order(tmp_path):
    path = tmp_path / "iteration-00001.jsonl"
    journal = Journal(path)
    journal.begin_phase()
    journal.record("sample", [("a", [1], "one"), ("b", [2], "two")])
    journal.record("sample", [("c", [3], "three"), ("d", [4], "four")])
    path.write_bytes(path.read_bytes()[:-2])
    again = Journal(path)
    assert again.recall("sample", "a", [1]) is None  # before the first phase
    again.begin_phase()
    assert [again.recall("sample", name, [n]) for name, n in (("b", 2), ("d", 4), ("c", 3), ("a", 1))] == [
        *("two", None, None, "one")
    ]
    again.begin_phase()
    assert again.recall("sample", "a", [1]) is None


def test_the_first_line_that_is_marked_is_forgotten_with_all_after_it_in_whatever_order_they_are_recalled(tmp_path):
    path = tmp_path / "iteration-00001.jsonl"
    for number in range(4):
        once(Journal(path), number, number, number)
    journal = Journal(path)
    for number in (2, 1, 3):
        assert journal.recall("n", str(number), number) == number
        journal.mark()
    journal.forget_from_mark()
    assert list(Journal(path)._answers) == ["n 0 0"]


def test_what_policies_of_a_run_of_other_facts_sampled_is_cut_off_with_all_after_it(tmp_path, caplog):
    def written(facts, *versions):
        path = journal_file(tmp_path, len(versions))
        journal = Journal(path, facts)
        for number, version in enumerate(versions):
            journal.record("sample", [(str(number), number, {"version": version})])
            journal.record("reward", [(str(number), number, [0.5, {}])])
        return path

    one, other = written("own", 1, 4, 1), written("others", 1, 2, 3, 1)
    whole = one.read_bytes()
    forget_foreign(tmp_path, 3, "own")
    assert not caplog.records
    forget_foreign(tmp_path, 2, "own")
    assert "4 recorded answers of policies after iteration 2" in caplog.text
    assert one.read_bytes() == whole
    assert list(Journal(other)._answers) == ["sample 0 0", "reward 0 0", "sample 0 1", "reward 0 1"]


def test_completions_survive_bit_for_bit():
    rng = np.random.default_rng(0)
    given = Completion(
        token_ids=np.array([3, 4], dtype=np.int32),
        logprobs=-rng.exponential(size=2).astype(np.float32),
        finish_reason="stop",
        entropies=rng.random(2).astype(np.float32),
        top_ids=np.array([[1, 2], [3, 4]], dtype=np.int32),
        top_logprobs=-rng.random((2, 2)).astype(np.float32),
    )
    again = completion_from_json(completion_to_json(given))
    for name in ("token_ids", "logprobs", "entropies", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(again, name), getattr(given, name))
        assert getattr(again, name).dtype == getattr(given, name).dtype
    assert again.finish_reason == "stop"
