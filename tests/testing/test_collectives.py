"""Operations of ranks that end, and such that do not: who waits where, and for whom."""

import pytest

from treewise.testing.collectives import Collective, deadlock, in_runs


def op(kind, *group, num_bytes=1000, number=0):
    return Collective(kind, group, number, num_bytes, True)


PAIRS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


def all_and_pairs(rank):
    """A sum over all, one over each pair, and a gathering over all."""
    return [op("all_reduce", 0, 1, 2, 3), op("all_reduce", *PAIRS[rank]), op("all_gather", 0, 1, 2, 3)]


def test_ranks_that_enter_the_same_end() -> None:
    assert deadlock({rank: all_and_pairs(rank) for rank in range(4)}) is None


def test_two_operations_in_another_order_never_end() -> None:
    ranks = {rank: all_and_pairs(rank) for rank in range(4)}
    ranks[2][:2] = ranks[2][1::-1]
    assert deadlock(ranks) == (
        "Ranks 0, 1, 3 wait in all_reduce (1,000 bytes) of ranks 0 to 3, operation 1, for 2.\n"
        "Rank 2 waits in all_reduce (1,000 bytes) of ranks 2, 3, operation 1, for 3."
    )


def test_an_operation_that_one_rank_lacks_never_ends() -> None:
    ranks = {rank: all_and_pairs(rank) for rank in range(4)}
    ranks[1].pop()
    found = deadlock(ranks)
    assert found == (
        "Ranks 0, 2, 3 wait in all_gather (1,000 bytes) of ranks 0 to 3, operation 3, for 1.\nRank 1 came to the end."
    )


def test_a_ring_of_waits_is_found() -> None:
    ends = [op("broadcast", 0, 1), op("broadcast", 1, 2), op("broadcast", 0, 2)]
    ranks = {0: [ends[0], ends[2]], 1: [ends[1], ends[0]], 2: [ends[2], ends[1]]}
    assert "Rank 1 waits in broadcast (1,000 bytes) of ranks 1, 2, operation 1, for 2." in str(deadlock(ranks))


@pytest.mark.parametrize("other", [op("all_gather", 0, 1), op("all_reduce", 0, 1, num_bytes=1004)])
def test_operations_that_do_not_fit_are_found(other) -> None:
    assert "their operations do not fit" in str(deadlock({0: [op("all_reduce", 0, 1)], 1: [other]}))


def test_exchanges_of_other_sizes_fit() -> None:
    ranks = {rank: [op("all_to_all", 0, 1, num_bytes=rank)] for rank in range(2)}
    assert deadlock(ranks) is None


def test_two_groups_of_the_same_ranks_are_apart() -> None:
    first, second = op("all_reduce", 0, 1), op("all_reduce", 0, 1, number=1)
    found = deadlock({0: [first, second], 1: [second, first]})
    assert "another group of these" in str(found)


def test_what_a_rank_sends() -> None:
    group = range(4)
    assert op("all_reduce", *group).num_sent == 1500
    assert op("all_gather", *group).num_sent == 750


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], "nobody"), ([4], "4"), ([1, 2], "1, 2"), ([0, 1, 2, 3], "0 to 3"), ([0, 8, 16, 24], "0 to 24 by 8"),
        ([0, 2, 3, 4, 9], "0, 2, 3, 4, 9"),
    ],
)  # fmt: skip
def test_numbers_in_runs(numbers, text) -> None:
    assert in_runs(numbers) == text
