"""Records in, rows out, in order: in this process, or in a pool of processes that each load the tokenizer once."""

import multiprocessing
import os
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType

from treewise.data.io.files import RawRecord
from treewise.data.io.rows import RecordResult
from treewise.data.records import RecordReader
from treewise.errors import ConfigError

Job = tuple[RawRecord, Path | None]
BATCH_BYTES = 256_000
BATCH_RECORDS = 256
MIN_BYTES_FOR_POOL = 1_000_000  # of the sources; below, starting processes costs more than they save
MAX_WORKERS = 16

_reader: RecordReader | None = None  # of a worker process


def choose_num_workers(num_workers: int | None, num_bytes: int) -> int:
    """Processes to start; 0 means this process. By default all cores, where there is enough to do."""
    if num_workers is not None:
        if num_workers < 0:
            raise ConfigError(f"num_workers is {num_workers}; give 0 (this process) or more.")
        return num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS) if num_bytes >= MIN_BYTES_FOR_POOL and cores > 1 else 0


def read_all(jobs: Iterable[Job], reader: RecordReader, num_workers: int) -> Iterator[tuple[int, list[RecordResult]]]:
    """Batches of results in the order of the jobs, each with the bytes it came from."""
    batches = _batches(jobs)
    if num_workers == 0:
        for num_bytes, batch in batches:
            yield num_bytes, [result for raw, path in batch for result in reader.read_samples(raw, path)]
        return
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
    return [result for raw, path in batch for result in _reader.read_samples(raw, path)]


def _batches(jobs: Iterable[Job]) -> Iterator[tuple[int, list[Job]]]:
    """Jobs in batches, each with its bytes."""
    batch: list[Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job[0].num_bytes
        if size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
            yield size, batch
            batch, size = [], 0
    if batch:
        yield size, batch
