"""Requests of many rollouts to one sampler: those that wait together are one batch.

A batch is due as soon as nobody is left who could bring a request for it, or once its first has waited for
`gather_seconds`. Its requests have an order of their own, so that no batch depends on who came first. A sampler that
answers several calls at once (servers) gets each request on its own, as soon as it comes.

Environments sample in the thread that drives them (`sample`); the calls of agents come from many threads, and are
sampled in one more (`serve`).
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from treewise.errors import SamplerError
from treewise.rl.samplers.protocol import Completion, Sampler, SampleRequest, TextStops, sample_in_parts

CLOSED = "the sampler was closed."
Answered = Callable[[Completion | BaseException], object]


@dataclass(slots=True, eq=False)
class _Asked:
    """A request of one continuation, and what is called with what came of it."""

    request: SampleRequest
    answered: Answered
    order: tuple[int, ...]


class Batcher:
    """One sampler for many rollouts.

    Parameters:
        gather_seconds: for so long the first request of a batch waits for others; None: until there are none.
        on_sampled: is called with the tokens of each completion, in the thread that samples.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        gather_seconds: float | None = 0.01,
        on_sampled: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.sampler, self.gather_seconds = sampler, gather_seconds
        self._num_expected: int | None = None
        self._at_once: int | None = getattr(sampler, "max_concurrent", None)
        self._on_sampled = on_sampled
        self._waiting = list[_Asked]()
        self._open = set[_Asked]()
        self._since = 0.0  # when the first of them came, or the sampler was ready for it
        self._changed = threading.Condition()
        self._is_closed = self._is_served = False
        self._threads = list[threading.Thread]()
        self._beside = ThreadPoolExecutor(2, "treewise-records")

    @property
    def is_on_servers(self) -> bool:
        """Whether each request is a batch."""
        return self._at_once is not None

    @property
    def num_open(self) -> int:
        """Requests that wait or are sampled."""
        return len(self._open)

    def submit(self, request: SampleRequest, answered: Answered, order: tuple[int, ...] = ()) -> None:
        """A request of one continuation; `answered` gets it, or why there is none, in the thread that samples."""
        asked = _Asked(request, answered, order)
        with self._changed:
            if not self._is_closed:
                if not self._waiting:
                    self._since = time.monotonic()
                self._open.add(asked)
                self._waiting.append(asked)
                if self._at_once is not None and len(self._threads) < min(self._at_once, len(self._open)):
                    self._start(self._serve_calls)
                self._changed.notify_all()
                return
        answered(SamplerError(CLOSED))

    def seconds_left(self, num_others: int | None) -> float | None:
        """Until a batch is due; None where no request waits for one.

        num_others: those who may bring one more; None: nobody counts them.
        """
        if self.is_on_servers or not self._waiting:
            return None
        if num_others == 0:
            return 0.0
        return (
            math.inf if self.gather_seconds is None else max(0.0, self._since + self.gather_seconds - time.monotonic())
        )

    def sample(self) -> None:
        """One batch of all that wait. Raises what the sampler or `answered` raises, unless it is served."""
        with self._changed:
            batch, self._waiting = sorted(self._waiting, key=lambda asked: asked.order), []
        self._sample(batch)
        self._since = time.monotonic()

    def serve(self) -> "Batcher":
        """Batches are sampled in a thread of this from now on; what a sampler raises is an answer."""
        if not self.is_on_servers:
            self._start(self._serve_batches)
        return self

    def expect(self, number: int) -> None:
        """Requests for which a served batch waits at most: of so many episodes that run."""
        with self._changed:
            self._num_expected = number
            self._changed.notify_all()

    def beside(self, work: Callable[..., object], *args: object) -> None:
        """Does what follows a batch, beside the sampler's thread; after the end, in the caller's."""
        try:
            self._beside.submit(work, *args)
        except RuntimeError:  # of a call that came while it ended: who ends its episode waits for it
            work(*args)

    def close(self) -> None:
        """Ends the threads; requests that wait are answered with an error. What a server computes is not waited for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if not self.is_on_servers:
            for thread in self._threads:
                thread.join()
        for asked in list(self._open) if self._is_served else ():
            self._answer(asked, SamplerError(CLOSED))
        self._beside.shutdown()

    # -- threads ------------------------------------------------------------------------------------------------------

    def _start(self, work: Callable[[], None]) -> None:
        self._is_served = True
        self._threads.append(threading.Thread(target=work, daemon=True, name="treewise-batches"))
        self._threads[-1].start()

    def _serve_calls(self) -> None:
        """In each of as many threads as a server takes calls."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                asked = self._waiting.pop(0)
            self._sample([asked])

    def _serve_batches(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (left := self._seconds_left()) != 0.0:
                    self._changed.wait(left)
                if self._is_closed:
                    return
            self.sample()

    def _seconds_left(self) -> float | None:
        expected = self._num_expected
        left = self.seconds_left(None if expected is None else max(expected - len(self._waiting), 0))
        return None if left == math.inf else left

    # -- batches ------------------------------------------------------------------------------------------------------

    def _sample(self, batch: Sequence[_Asked]) -> None:
        asked = []
        for each in batch:
            if isinstance(each.request, TextStops) and each.request.is_cancelled():
                self._answer(each, SamplerError("nobody waits for this call."))
            else:
                asked.append(each)
        missing = dict(enumerate(asked))

        def done(number: int, completions: Sequence[Completion]) -> None:
            self._on_sampled(completions[0].num_tokens)
            self._answer(missing.pop(number), completions[0])

        try:
            if asked:
                sample_in_parts(self.sampler, [each.request for each in asked], done)
        except BaseException as error:  # is raised where the answers are waited for
            if not self._is_served:
                raise
            left = list(missing.values())
            is_of_one = isinstance(error, Exception) and not (isinstance(error, SamplerError) and error.is_away)
            if len(asked) > 1 and is_of_one:  # one request's fault is no other's: which it was
                for item in left:
                    self._sample([item])
            else:
                for item in left:
                    self._answer(item, error)

    def _answer(self, asked: _Asked, result: Completion | BaseException) -> None:
        """Once: what comes after the end is nobody's."""
        with self._changed:
            if asked not in self._open:
                return
            self._open.remove(asked)
        asked.answered(result)
