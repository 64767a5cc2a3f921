"""Packing: every item once, no bin too full, and close to the fewest bins that brute force finds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.planning.bin_packing import best_fit, in_order


@st.composite
def sizes_and_capacity(draw, max_items=30):
    capacity = draw(st.integers(1, 20))
    return draw(st.lists(st.integers(1, capacity), max_size=max_items)), capacity


def fewest_bins(sizes, capacity):
    """By trying every assignment, largest first, with equal rooms tried once."""
    ordered, best = sorted(sizes, reverse=True), len(sizes)

    def place(item, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if item == len(ordered):
            best = len(rooms)
            return
        size = ordered[item]
        for room in set(rooms):
            if room >= size:
                rest = list(rooms)
                rest[rest.index(room)] -= size
                place(item + 1, rest)
        place(item + 1, [*rooms, capacity - size])

    place(0, [])
    return best


def check_bins(bins, sizes, capacity):
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    assert all(sum(sizes[item] for item in items) <= capacity for items in bins)
    assert all(items == sorted(items) for items in bins)
    assert bins == sorted(bins)


@given(sizes_and_capacity())
def test_best_fit_bins_hold_every_item_once(given_sizes):
    sizes, capacity = given_sizes
    check_bins(best_fit(sizes, capacity), sizes, capacity)


@given(sizes_and_capacity(), st.integers(1, 5))
def test_in_order_bins_hold_every_item_once(given_sizes, num_open_bins):
    sizes, capacity = given_sizes
    check_bins(in_order(sizes, capacity, num_open_bins), sizes, capacity)


@given(sizes_and_capacity(max_items=9))
def test_best_fit_uses_at_most_one_bin_more_than_the_fewest(given_sizes):
    sizes, capacity = given_sizes
    assert len(best_fit(sizes, capacity)) <= fewest_bins(sizes, capacity) + 1


def test_best_fit_chooses_the_fullest_bin():
    assert best_fit([5, 7, 3, 4, 1], 10) == [[0, 3, 4], [1, 2]]


def test_equal_sizes_keep_their_order():
    assert best_fit([2] * 5, 4) == [[0, 1], [2, 3], [4]]


def test_in_order_looks_back_at_the_newest_bins_only():
    sizes = [3, 4, 4, 1, 1]
    assert in_order(sizes, 4, num_open_bins=1) == [[0], [1], [2], [3, 4]]
    assert in_order(sizes, 4, num_open_bins=3) == [[0, 3], [1], [2], [4]]


@pytest.mark.parametrize("pack", [best_fit, lambda sizes, capacity: in_order(sizes, capacity, 4)])
def test_nothing_needs_no_bin(pack):
    assert pack([], 5) == []
