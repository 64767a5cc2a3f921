"""How far long work is: nobody listens by default; commands do, and print it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Listener(Protocol):
    """Whoever listens to how far long work is."""

    def begins(self, what: str, total: int | None, *, is_part: bool) -> None: ...
    def ends(self) -> None: ...
    def reaches(self, what: str, done: int, total: int | None, unit: str) -> None: ...


listeners: list[Listener] = []


def begin_work(what: str, total: int | None = None) -> None:
    """Tells that some work begins, and all before it is over. total: what later calls of `tell_progress` add up to, as
    the tokens of a step in several batches; None where nobody counts.
    """
    for listener in listeners:
        listener.begins(what, total, is_part=False)


@contextmanager
def busy_with(what: str, total: int | None = None) -> Iterator[None]:
    """Around work within other work, which goes on afterwards."""
    for listener in listeners:
        listener.begins(what, total, is_part=True)
    try:
        yield
    finally:
        for each in listeners:
            each.ends()


def tell_progress(what: str, done: int, total: int | None, unit: str = "token") -> None:
    """Tells how much is done of the present work, or of a part of it. total: None where nobody counts."""
    for listener in listeners:
        listener.reaches(what, done, total, unit)
