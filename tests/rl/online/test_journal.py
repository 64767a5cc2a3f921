"""Answers are recorded as they come, given again in order, and computed again where the record ends or differs."""

import itertools
import logging
import re
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from tests.damage import damages, no_room
from treewise.errors import CheckpointError, DiskError
from treewise.rl.online import journal
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


def test_answers_wait_for_room_and_are_then_recorded_whole(tmp_path, monkeypatch, caplog):
    path, waits = tmp_path / "journal.jsonl", itertools.count(1)
    written = Journal(path)
    written.begin_phase()
    written.record("sample", [("a", 1, "x" * 100)])
    size = path.stat().st_size
    with ExitStack() as full:
        full.enter_context(no_room(size + 50))

        def wait(_seconds):
            if next(waits) == 3:
                full.close()

        monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=wait))
        written.record("sample", [("b", 2, "y" * 100)])
    (told,) = caplog.records
    assert re.search(r"journal.jsonl cannot be written \(.*\): .* needed, .* free on its disk", told.getMessage())
    assert "The run waits for it, 10:00 at most." in told.getMessage()
    again = Journal(path)
    again.begin_phase()
    assert [again.recall("sample", name, number) for name, number in (("a", 1), ("b", 2))] == ["x" * 100, "y" * 100]


def test_a_run_without_room_ends_and_keeps_what_was_recorded(tmp_path, monkeypatch):
    clock = itertools.count(0, 400)
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=clock.__next__, sleep=lambda _: None))
    written = Journal(tmp_path / "journal.jsonl")
    written.record("sample", [("a", 1, "x")])
    with no_room(1), pytest.raises(DiskError, match="Make room"):
        written.record("sample", [("b", 2, "y")])
    assert Journal(tmp_path / "journal.jsonl").recall("sample", "a", 1) == "x"
    written.record("sample", [("b", 2, "y")])
    assert Journal(tmp_path / "journal.jsonl").recall("sample", "b", 2) == "y"
