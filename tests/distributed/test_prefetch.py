"""Made ahead: the results of a plain loop, one step early, each error at its own step."""

import threading
import traceback

import pytest

from treewise.distributed.prefetch import prefetched


def test_results_are_those_of_a_plain_loop():
    assert list(prefetched(range(20), lambda item: item * item)) == [item * item for item in range(20)]
    assert list(prefetched([], str)) == []


def test_the_next_one_is_made_while_this_one_is_used():
    is_made = [threading.Event() for _ in range(3)]
    threads = []

    def make(item):
        threads.append(threading.current_thread().name)
        is_made[item].set()
        return item

    for item in prefetched(range(3), make):
        if item < 2:
            assert is_made[item + 1].wait(timeout=30)
    assert all(name.startswith("treewise-prefetch") for name in threads)


def test_items_are_taken_in_the_callers_thread_and_one_ahead():
    taken = []

    def items():
        for item in range(4):
            taken.append((item, threading.current_thread()))
            yield item

    for item in prefetched(items(), str):
        assert [number for number, _ in taken] == list(range(min(4, int(item) + 2)))
    assert {thread for _, thread in taken} == {threading.current_thread()}


def fails_at(wrong):
    def make(item):
        if item == wrong:
            raise ValueError(f"item {item} is bad")
        return item

    return make


@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_an_error_is_raised_at_its_step_with_its_traceback(wrong):
    results = prefetched(range(4), fails_at(wrong))
    assert [next(results) for _ in range(wrong)] == list(range(wrong))
    with pytest.raises(ValueError, match=f"item {wrong} is bad") as raised:
        next(results)
    assert any(frame.name == "make" for frame in traceback.extract_tb(raised.value.__traceback__))


def test_an_error_of_the_items_is_raised_at_its_step():
    def items():
        yield 1
        raise OSError("disk gone")

    results = prefetched(items(), str)
    assert next(results) == "1"
    with pytest.raises(OSError, match="disk gone"):
        next(results)


def test_leaving_early_leaves_no_thread_behind():
    results = prefetched(range(100), str)
    assert next(results) == "0"
    results.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("treewise-prefetch")]
