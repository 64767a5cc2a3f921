"""Computes the next item of a loop in a thread while the caller uses this one."""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def prefetched(items: Iterable[Given], make: Callable[[Given], Made]) -> Generator[Made, None, None]:
    """`make(item)` of each item in order, the next one in a thread while the caller uses this one.

    One item is taken from `items` ahead of the one in use, always in the caller's thread, so a data loader need not be
    safe for threads. Results are those of a plain loop, as long as `make` depends on its item alone: it must neither
    draw from a shared random generator nor touch the device. An error of `make` or of `items` is raised in place
    of its own result, with its traceback. Leaving the loop early waits for the result in progress and drops it.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="treewise-prefetch") as thread:
        waiting = _next(iterator, make, thread)
        while waiting is not None:
            result = waiting.result()
            waiting = _next(iterator, make, thread)
            yield result


def _next(iterator: Iterator[Given], make: Callable[[Given], Made], thread: ThreadPoolExecutor) -> Future[Made] | None:
    """The next result, in progress; None if there are no more items. An error of `items` becomes that result."""
    try:
        item = next(iterator)
    except StopIteration:
        return None
    except Exception as error:
        failed: Future[Made] = Future()
        failed.set_exception(error)
        return failed
    return thread.submit(make, item)
