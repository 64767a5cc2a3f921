"""The requests that wait, and which number of each model has its turn. Not locked: the worker is."""

from collections.abc import Iterable

from treewise.serve.journal import QueuedRequest, RequestJournal


class RequestQueue:
    """waiting: by id, in the order of arrival; what has its answer waits to run again, or to be passed over."""

    def __init__(self, journal: RequestJournal) -> None:
        self._journal = journal
        self.waiting: dict[str, QueuedRequest] = {}
        self._next: dict[str, int] = {}

    def add(self, works: Iterable[QueuedRequest]) -> None:
        """Those that are there are replaced, in their place."""
        self.waiting |= {work.id: work for work in works}

    def next_of(self, owner: str) -> int:
        """The number that runs next; those that only have to be passed over are."""
        number = self._next.get(owner)
        if number is None:
            number = self._journal.snapshot_seq(owner) + 1
        while (work := self.waiting.get(f"{owner}:{number}")) is not None and work.is_done:
            del self.waiting[work.id]
            number = work.seq + 1
        self._next[owner] = number
        return number

    def go_to(self, owner: str, number: int) -> None:
        """Lets a model go on with this number."""
        self._next[owner] = number

    def head_of(self, owner: str) -> QueuedRequest | None:
        """The request whose turn it is; None: it has not come."""
        return self.waiting.get(f"{owner}:{self.next_of(owner)}")

    def asking(self) -> list[str]:
        """Models whose requests wait for an answer, in the order of their arrival."""
        return list(dict.fromkeys(work.owner for work in self.waiting.values() if not _is_sample_or_answered(work)))

    def asked_of(self, owner: str) -> list[QueuedRequest]:
        """A model's requests that wait for an answer."""
        return [work for work in self.waiting.values() if work.owner == owner and not _is_sample_or_answered(work)]

    def gaps(self, owner: str, below: int) -> list[tuple[int, int]]:
        """Numbers of a model below this one that have not come, each part with its first and last."""
        first, found = self.next_of(owner), []
        ranges = [(_number_in(work.id), work.seq) for work in self.waiting.values() if work.owner == owner]
        for number, last in [*sorted(ranges), (below, below)]:
            if first < min(number, below):
                found.append((first, min(number, below) - 1))
            first = max(first, last + 1)
        return found


def _is_sample_or_answered(work: QueuedRequest) -> bool:
    return work.is_answered or work.kind == "sample"


def _number_in(name: str) -> int:
    return int(name.rpartition(":")[2])
