"""Whose turn it is, and which numbers have not come."""

import pytest

from treewise.serve.journal import QueuedRequest, RequestJournal
from treewise.serve.request_queue import RequestQueue


@pytest.fixture
def turns(tmp_path):
    journal = RequestJournal(tmp_path / "journal.sqlite")
    for name in ("m", "n"):
        journal.put("model", name, "s", {})
    journal.snapshot("m", 2)
    yield RequestQueue(journal)
    journal.close()


def work(seq, owner="m", kind="optim_step", **more):
    return QueuedRequest(f"{owner}:{seq}", owner, seq, kind, **more)


def test_a_model_goes_on_behind_its_snapshot_and_passes_over_what_is_done(turns):
    assert [turns.next_of(owner) for owner in "mn"] == [3, 0]
    turns.add(
        [work(3, is_answered=True, is_done=True), QueuedRequest("m:4", "m", 9, "gap", is_answered=True, is_done=True)]
    )
    turns.add([work(10), work(11, is_answered=True)])
    assert turns.head_of("m") == work(10)
    assert list(turns.waiting) == ["m:10", "m:11"]
    turns.go_to("m", 11)
    assert turns.head_of("m") == work(11, is_answered=True)  # which trained, and runs again


def test_who_asks_is_who_has_no_answer(turns):
    """Samples have no turn; what runs again waits for somebody who asks."""
    turns.add([work(5, "n"), work(4), work(3, is_answered=True), work(7, "s", "sample"), work(6)])
    assert turns.asking() == ["n", "m"]
    assert turns.asked_of("m") == [work(4), work(6)]


@pytest.mark.parametrize(
    ("there", "below", "gaps"),
    [
        ([], 3, []),
        ([], 6, [(3, 5)]),
        ([5], 5, [(3, 4)]),
        ([4, 6, 7], 6, [(3, 3), (5, 5)]),
        ([7, 4], 9, [(3, 3), (5, 6), (8, 8)]),
        ([3, 4], 2**50, [(5, 2**50 - 1)]),
    ],
)
def test_numbers_that_have_not_come(there, below, gaps, turns):
    turns.add([work(4, "n"), work(5, "m:sample:0", "sample"), *map(work, there)])
    assert turns.gaps("m", below) == gaps
