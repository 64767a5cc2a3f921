"""Samples the next iterations in a thread while the present one trains, with weights that are at most `max_staleness`
updates old.

Version `v` is the policy after `v` iterations. Before iteration `n` is sampled the sampler takes the newest weights,
which are of version `n - max_staleness` at least: it waits for that one, and for no more. An iteration is handed to
the trainer when the weights for the next one are taken, so with `max_staleness` 1 iteration `n` has those of version
`n - 1`, whatever is faster, sampling or training. With more the version depends on time; it is recorded with every
token.

The thread takes weights between two spells of work of the trainer (to train, evaluate or save). Of several processes
each has such a thread. All trainers have the same spells in the same order, so the threads agree on one by its number:
the last that any trainer has begun. Trainers that are behind go on to its end, none begins another, and all threads
take the same weights. What threads exchange goes through a group of their own, and what trainers exchange outside of
spells through another: in the run's own a thread may gather weights that are in parts.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from treewise.distributed import ranks
from treewise.rl.online.drawn import Drawn

JOIN_SECONDS = 10.0


class EndedError(Exception):
    """The run is over; ends the thread at the next completion."""


class Ahead:
    """The thread. All methods are for the trainer's own, but `check`.

    Attributes:
        seconds_waited: of the trainer, for rollouts, so far.

    Parameters:
        collect: samples an iteration with a version of the policy, in the thread.
        hand_over: takes the present weights for the sampler, between spells of work; what it returns gives them to it.
        first, last: iterations to sample, `last` not included. The policy at hand is of version `first`.
        group: of the threads of all processes (`groups.new_group`).
    """

    def __init__(
        self,
        collect: Callable[[int, int], Drawn],
        hand_over: Callable[[], Callable[[], None]],
        first: int,
        last: int,
        max_staleness: int,
        group: object = None,
    ) -> None:
        self._collect, self._hand_over, self._staleness, self._group = collect, hand_over, max_staleness, group
        self._first, self._last = first, last
        self._version, self._sampling_version = first, -1
        self._collected: dict[int, Drawn] = {}
        self._changed = threading.Condition()
        self._is_over = self._is_done = False
        self._num_begun = self._num_ended = 0  # spells of the trainer
        self._limit: int | None = None  # the spell after which none may begin
        self._needed: int | None = None  # the version that the thread waits for
        self._error: BaseException | None = None
        self.seconds_waited = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="treewise-ahead")

    def start(self) -> None:
        """Begins to collect, in a thread."""
        self._thread.start()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            ranks.go_through(self._group)
            self._renew(self._first)()
            for iteration in range(self._first, self._last):
                collected = self._collect(iteration, self._sampling_version)
                finish = self._renew(iteration + 1) if iteration + 1 < self._last else None
                with self._changed:
                    self._collected[iteration] = collected
                    self._changed.notify_all()
                if finish is not None:
                    finish()
        except BaseException as error:  # raised again where the trainer waits
            self._error = error
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _renew(self, iteration: int) -> Callable[[], None]:
        """Takes the newest weights, if all trainers let them be or the ones at hand are too old; what is returned gives
        them to the sampler, while trainers work.
        """
        oldest = max(self._first, iteration - self._staleness)
        with self._changed:
            if is_needed := self._sampling_version < oldest:
                self._needed = oldest
                self._changed.wait_for(lambda: self._is_over or self._version >= oldest)
            self._needed, self._limit = None, self._num_begun
            own = self._num_begun, self._num_begun > self._num_ended
        begun = ranks.on_every_rank(lambda: own)
        if not is_needed and any(is_working for _, is_working in begun):
            self._let_begin()
            return lambda: None
        with self._changed:
            self._limit = max(number for number, _ in begun)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or self._num_ended == self._limit)
            self.check()
            give, version = self._hand_over(), self._version
        self._let_begin()

        def finish() -> None:
            give()
            with self._changed:
                self._sampling_version = version
                self._changed.notify_all()

        return finish

    def _let_begin(self) -> None:
        with self._changed:
            self._limit = None
            self._changed.notify_all()

    def check(self, *_: object) -> None:
        """Ends the thread where the run is over; is called with each completion."""
        if self._is_over:
            raise EndedError

    # -- the trainer --------------------------------------------------------------------------------------------------

    def wait_for(self, iteration: int) -> None:
        """Until an iteration is sampled. Raises what the thread ended with."""
        with self._changed:
            began = time.perf_counter()
            self._changed.wait_for(lambda: iteration in self._collected or self._is_done)
            self.seconds_waited += time.perf_counter() - began
            if iteration not in self._collected:
                raise self._error or EndedError

    def take(self, iteration: int) -> Drawn:
        """What was sampled for an iteration. Raises as `wait_for`."""
        self.wait_for(iteration)
        return self._collected.pop(iteration)

    @contextmanager
    def working(self, version: int | None = None) -> Iterator[None]:
        """Around a spell of work, during which the weights are not taken. version: theirs afterwards. Where the work
        fails, the run is over.
        """
        with self._changed:
            self._changed.wait_for(self._may_begin)
            self._num_begun += 1
        try:
            yield
        except BaseException:
            self._is_over = True  # weights in between are of no version
            raise
        with self._changed:
            self._num_ended, self._version = self._num_begun, self._version if version is None else version
            self._changed.notify_all()

    def _may_begin(self) -> bool:
        is_free = self._limit is None or self._num_begun < self._limit
        return self._is_over or self._is_done or (is_free and (self._needed is None or self._needed > self._version))

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Around work that needs the sampler with the newest weights, beside what the thread samples with them."""
        with self._changed:
            self._changed.wait_for(lambda: self._sampling_version == self._version or self._is_done)
            if self._sampling_version != self._version:
                self._hand_over()()
                self._sampling_version = self._version
        with self.working():
            yield

    def close(self) -> bool:
        """Ends the thread; what it was sampling is lost, as by a kill. Whether it has ended."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        ranks.go_through(None)
        self._thread.join(JOIN_SECONDS)
        return not self._thread.is_alive()
