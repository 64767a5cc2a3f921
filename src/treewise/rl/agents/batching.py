"""Requests of all episodes to one sampler: those that wait while it works are its next batch.

A sampler that answers several calls at once (servers) gets each request on its own, as soon as it comes.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from treewise.errors import SamplerError
from treewise.rl.samplers.protocol import Completion, Sampler, SampleRequest, TextStops, sample_in_parts

CLOSED = "the sampler was closed."


@dataclass(frozen=True, slots=True)
class WatchedRequest(TextStops):
    """A request whose sampled ids are shown as they come. on_tokens: is called with all of them so far, in the
    sampler's thread, and must not keep them."""

    on_tokens: Callable[[Sequence[int]], None] | None = field(default=None, compare=False)

    def is_stopped(self, token_ids: Sequence[int]) -> bool:
        """See `SampleRequest`."""
        if self.on_tokens is not None:
            self.on_tokens(token_ids)
        return TextStops.is_stopped(self, token_ids)


class Batcher:
    """One sampler for many threads.

    Parameters:
        gather_seconds: for so long the first request of a batch waits for others.
        at_once: requests of one batch.
        on_sampled: is called with the tokens of each completion, in a thread of this.

    Attributes:
        num_sampled: tokens that came from the sampler. num_expected: requests for which a batch waits at most: of so
            many episodes; None where nobody counts these.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        gather_seconds: float = 0.01,
        at_once: int = 256,
        on_sampled: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.sampler, self.gather_seconds, self.at_once = sampler, gather_seconds, at_once
        self.num_expected: int | None = None
        self._on_sampled = on_sampled
        self.num_sampled = self.num_batches = 0
        self._is_closed = False
        self._open: set[Future[Completion]] = set()
        self._todo: queue.SimpleQueue[tuple[SampleRequest, Future[Completion]] | None] = queue.SimpleQueue()
        self._working = threading.RLock()  # while the sampler works in this process
        self._counting = threading.Lock()
        concurrent = getattr(sampler, "max_concurrent", None)
        self._beside = ThreadPoolExecutor(2, "treewise-records")
        self._is_on_servers, run = concurrent is not None, self._run if concurrent is None else self._run_call
        self._threads = [
            threading.Thread(target=run, daemon=True, name="treewise-batches") for _ in range(concurrent or 1)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests that wait or are sampled."""
        return len(self._open)

    def submit(self, request: SampleRequest) -> "Future[Completion]":
        """A request of one continuation."""
        future: Future[Completion] = Future()
        with self._counting:
            self._open.add(future)
            if not self._is_closed:
                self._todo.put((request, future))
                return future
        self._answer(future, SamplerError(CLOSED))
        return future

    def beside(self, work: Callable[..., object], *args: object) -> None:
        """Does what follows a batch, beside the sampler's thread; after the end, in the caller's."""
        try:
            self._beside.submit(work, *args)
        except RuntimeError:  # of a call that came while it ended: who ends its episode waits for it
            work(*args)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The sampler does not work meanwhile; what comes waits."""
        with self._working:
            yield

    def close(self) -> None:
        """Ends the threads; requests that wait are answered with an error. What a server computes is not waited for."""
        with self._counting:
            self._is_closed = True
            for _ in self._threads:
                self._todo.put(None)
        if not self._is_on_servers:
            self._threads[0].join()
        for future in list(self._open):
            self._answer(future, SamplerError(CLOSED))
        self._beside.shutdown()

    def _run_call(self) -> None:
        """In each of as many threads as a server takes calls."""
        while (item := self._todo.get()) is not None:
            self._sample([item])

    def _run(self) -> None:
        while (first := self._todo.get()) is not None:
            batch, end = [first], time.monotonic() + self.gather_seconds
            while len(batch) < self.at_once:
                is_whole = self.num_expected is not None and len(batch) >= self.num_expected
                try:
                    more = self._todo.get(timeout=0.0 if is_whole else max(0.0, end - time.monotonic()))
                except queue.Empty:
                    break
                if more is None:
                    self._todo.put(None)
                    break
                batch.append(more)
            with self._working:
                self._sample(batch)

    def _sample(self, batch: Sequence[tuple[SampleRequest, "Future[Completion]"]]) -> None:
        asked = []
        for request, future in batch:
            if isinstance(request, TextStops) and request.is_cancelled():
                self._answer(future, SamplerError("nobody waits for this call."))
            else:
                asked.append((request, future))
        missing = dict(enumerate(asked))

        def done(number: int, completions: Sequence[Completion]) -> None:
            with self._counting:
                self.num_sampled += completions[0].num_tokens
            self._on_sampled(completions[0].num_tokens)
            self._answer(missing.pop(number)[1], completions[0])

        try:
            if asked:
                self.num_batches += 1
                sample_in_parts(self.sampler, [request for request, _ in asked], done)
        except BaseException as error:  # is raised where the answers are waited for
            left = list(missing.values())
            is_of_one = isinstance(error, Exception) and not (isinstance(error, SamplerError) and error.is_away)
            if len(asked) > 1 and is_of_one:  # one request's fault is no other's: which it was
                for item in left:
                    self._sample([item])
            else:
                for _, future in left:
                    self._answer(future, error)

    def _answer(self, future: "Future[Completion]", result: Completion | BaseException) -> None:
        """Once: what comes after the end is nobody's."""
        with self._counting:
            if future not in self._open:
                return
            self._open.remove(future)
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
