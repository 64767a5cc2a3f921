"""Work of one process alone; of several: tests/trainer/test_ranks.py."""

import errno

import pytest
import torch

from treewise.distributed import ranks
from treewise.errors import DataError


def fails():
    raise DataError("bad row")


def test_one_process_does_all_the_work():
    assert (ranks.count(), ranks.own()) == (1, 0)
    assert ranks.on_first_rank(lambda: 7) == 7
    assert ranks.on_every_rank(lambda: 7) == [7]
    assert ranks.gather_texts("a") == ["a"]
    assert ranks.sum_over(torch.device("cpu"), 1.0, 2.5) == [1.0, 2.5]


@pytest.mark.parametrize("work", [ranks.on_first_rank, ranks.on_every_rank])
def test_its_errors_are_raised_as_they_are(work):
    with pytest.raises(DataError, match="bad row"):
        work(fails)


def test_an_error_of_another_process_that_is_not_ours_names_it():
    with pytest.raises(RuntimeError, match="rank 1: ZeroDivisionError: integer"):
        ranks._unpack([ranks._outcome(lambda: 7), ranks._outcome(lambda: 1 // 0)])


def test_an_error_of_the_system_on_another_process_keeps_its_number_and_file(monkeypatch):
    def gather(outcomes, own, group=None):
        outcomes[:] = own, ranks._outcome(open_full)

    def open_full():
        raise OSError(errno.ENOSPC, "No space left on device", "/run/journal")

    monkeypatch.setattr(ranks, "count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(OSError, match="No space") as full:
        ranks.on_every_rank(lambda: 7)
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, "/run/journal")
