"""Records in, rows out, in order, in a pool of processes that each load the tokenizer once."""

import multiprocessing
import os
import pickle
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from types import ModuleType

from treewise.data.io.rows import RecordResult
from treewise.data.records import Job, RecordReader
from treewise.errors import ConfigError

_reader: RecordReader | None = None  # of a worker process


def read_all(
    batches: Iterator[tuple[int, list[Job]]], reader: RecordReader, num_workers: int
) -> Iterator[tuple[int, list[RecordResult]]]:
    """Results of batches in their order, each with the bytes it came from."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, spawn, initializer=_start, initargs=(pickle.dumps(reader),))
    running: deque[tuple[int, Future[list[RecordResult]]]] = deque()
    try:
        while True:
            for num_bytes, batch in islice(batches, 2 * num_workers + 2 - len(running)):
                with _main_left_alone():  # the first of these starts the processes
                    running.append((num_bytes, pool.submit(_work, batch)))
            if not running:
                return
            num_bytes, future = running.popleft()
            yield num_bytes, future.result()
    except BrokenProcessPool as error:
        raise ConfigError(
            "the data workers did not start or were killed (out of memory, or a tokenizer class of the script itself); "
            "lower num_workers, or set num_workers=0."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _main_left_alone() -> Iterator[None]:
    """Inside, spawned processes do not import the user's main module again, which workers do not need.

    So a script needs no `if __name__ == "__main__":`, and one read from standard input works too.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start(reader: bytes) -> None:
    global _reader
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _reader = pickle.loads(reader)  # bytes of our own parent process


def _work(batch: list[Job]) -> list[RecordResult]:
    assert _reader is not None
    return _reader.read_batch(batch)
