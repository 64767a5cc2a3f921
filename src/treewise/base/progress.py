"""How far long work is: nobody listens by default; commands do, and print it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

ERASE = "\r\x1b[2K"  # the line of a terminal, on which progress may stand


class Listener(Protocol):
    """Whoever listens to how far long work is. begins: gives what `ends` takes when that work is over."""

    def begins(self, what: str, total: int | None) -> object: ...
    def ends(self, work: object) -> None: ...
    def reaches(self, what: str, done: int, total: int | None, unit: str) -> None: ...


listeners: list[Listener] = []


@contextmanager
def busy_with(what: str, total: int | None = None) -> Iterator[None]:
    """Around a piece of work; afterwards the work around it goes on.

    total: what calls of `tell_progress` inside add up to, as the tokens of a step in several batches; None where nobody
    counts.
    """
    begun = [(listener, listener.begins(what, total)) for listener in listeners]
    try:
        yield
    finally:
        for listener, work in begun:
            listener.ends(work)


def tell_progress(what: str, done: int, total: int | None, unit: str = "token") -> None:
    """Tells how much is done of the present work, or of a part of it. total: None where nobody counts."""
    for listener in listeners:
        listener.reaches(what, done, total, unit)
