"""Streams of a GPU that is not there: which of them an operation is queued in, and whether what it touches is ready.

Operations run at once, in the order in which they are queued. Each stream has a clock, and notes of the others' how far
they have come when it waits for them. So three mistakes show that a GPU would show as wrong numbers, now and then: an
operation reads what one of another stream writes, or writes what it reads, and does not wait for it (`RuntimeError`);
or memory is freed while a stream may still use it that the allocator was not told of (`faults`).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

UNORDERED = "a stream works with memory that another one may not be done with"


Event = dict["PretendStream", int]  # how far each stream has come


class PretendStream:
    """A queue. clock: of each stream, itself included, how many of its operations are done before the next one here."""

    def __init__(self, *_: object) -> None:
        self.clock: dict[PretendStream, int] = {}

    def wait_stream(self, other: "PretendStream") -> None:
        """What is queued here from now on runs after what is queued in another stream."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """What is queued here from now on runs after an event."""
        for stream, count in event.items():
            self.clock[stream] = max(count, self.clock.get(stream, 0))

    def record_event(self) -> Event:
        """An event that follows what is queued."""
        return dict(self.clock)


@dataclass(slots=True)
class _Use:
    """Of a storage: the stream that its memory was taken in, the last write, reads since, streams that the allocator
    was told of."""

    owner: PretendStream
    write: tuple[PretendStream, int] | None = None
    reads: dict[PretendStream, int] = field(default_factory=dict)
    told: set[PretendStream] = field(default_factory=set)
    is_pinned: bool = False


class PretendStreams:
    """The streams of one GPU; `kernels` is where operations are queued that name none."""

    def __init__(self) -> None:
        self.kernels = self.current = PretendStream()
        self.num_beside = 0  # operations of other streams
        self.faults: list[str] = []
        self._uses: dict[int, _Use] = {}

    @contextmanager
    def inside(self, stream: PretendStream) -> Iterator[None]:
        """Inside, operations are queued in a stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def queue(self, reads: list[torch.UntypedStorage], writes: list[torch.UntypedStorage]) -> None:
        """Notes an operation of the current stream. reads, writes: storages of the device, or pinned."""
        here = self.current
        self.num_beside += here is not self.kernels
        here.clock[here] = here.clock.get(here, 0) + 1
        for storage in reads:
            use = self._of(storage)
            self._check([use.write] if use.write else [])
            use.reads[here] = here.clock[here]
        for storage in writes:
            use = self._of(storage)
            self._check([*use.reads.items(), *([use.write] if use.write else [])])
            use.write, use.reads = (here, here.clock[here]), {}

    def told(self, storage: torch.UntypedStorage, stream: PretendStream) -> None:
        """The allocator keeps freed memory until a stream is done with what was queued by then."""
        self._of(storage).told.add(stream)

    def _check(self, earlier: list[tuple[PretendStream, int]]) -> None:
        if any(self.current.clock.get(stream, 0) < count for stream, count in earlier):
            raise RuntimeError(UNORDERED)

    def _of(self, storage: torch.UntypedStorage) -> _Use:
        key = storage._cdata
        if key not in self._uses:
            self._uses[key] = _Use(self.current)
            weakref.finalize(storage, self._free, key).atexit = False
        return self._uses[key]

    def pinned(self, storage: torch.UntypedStorage) -> None:
        """Memory of the host, which torch keeps until all copies of it are done, whatever their stream."""
        self._of(storage).is_pinned = True

    def _free(self, key: int) -> None:
        use = self._uses.pop(key)
        if use.is_pinned:
            return
        marks = [*use.reads.items(), *([use.write] if use.write else [])]
        for stream, count in marks:
            if stream not in (use.owner, *use.told) and use.owner.clock.get(stream, 0) < count:
                self.faults.append(f"freed before {'a copy' if stream is not self.kernels else 'a kernel'} was done")
