"""Work of one process alone; of several: tests/trainer/test_ranks.py."""

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
