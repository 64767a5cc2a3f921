"""Work divided over a few processes that start afresh, whose results come as they are made.

A process that dies takes its piece of work along and no other; at the end of the time all are ended, whatever they do.
"""

import multiprocessing
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Died:
    """In place of a result: the process ended. exit_code: negative for a signal."""

    exit_code: int | None


def side_by_side(
    work: Callable[[str], T], names: Sequence[str], num_processes: int, deadline: float
) -> Generator[tuple[str, T | Died]]:
    """Each name with its result, in the order in which they are made, until `deadline` (of `time.perf_counter`).

    work: found again by its name in each process, which imports its module; what it raises ends the process.
    """
    left = list(names)
    workers = [_Worker(work) for _ in range(min(num_processes, len(left)))] if perf_counter() < deadline else []
    try:
        for worker in workers:
            worker.give(left.pop(0))
        while busy := {worker.end: worker for worker in workers if worker.name is not None}:
            ready = wait(list(busy), max(0.0, deadline - perf_counter()))
            if not ready:
                return
            for end in ready:
                worker = busy[end]  # type: ignore[index]
                name, found = worker.take()
                yield name, found
                if left and perf_counter() < deadline:
                    if isinstance(found, Died):
                        workers[workers.index(worker)] = worker = _Worker(work)
                    worker.give(left.pop(0))
    finally:
        for worker in workers:
            worker.end_now()


class _Worker(Generic[T]):
    """One process. name: of what it works at; None: it is idle, or gone."""

    def __init__(self, work: Callable[[str], T]) -> None:
        context = multiprocessing.get_context("spawn")  # a copy of a process cannot use its GPU
        self.end, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(work, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.name: str | None = None

    def give(self, name: str) -> None:
        """Begins with a piece of work."""
        self.name = name
        with suppress(BrokenPipeError):  # it died: `take` says so
            self.end.send(name)

    def take(self) -> tuple[str, T | Died]:
        """What it was given, and the result, which is there."""
        name, self.name = self.name, None
        assert name is not None
        try:
            return name, self.end.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return name, Died(self.process.exitcode)

    def end_now(self) -> None:
        """Kills the process, whatever it works at."""
        self.process.kill()
        self.process.join()
        self.end.close()


def _serve(work: Callable[[str], object], end: Connection) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # of the whole group: who gives the work ends this process
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError):
        while True:
            end.send(work(end.recv()))
