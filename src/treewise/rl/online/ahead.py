"""Samples the next iterations in a thread while the present one trains, with weights that are at most `max_staleness`
updates old.

Version `v` is the policy after `v` iterations. Before iteration `n` is sampled the sampler takes the newest weights,
which are of version `n - max_staleness` at least: it waits for that one, and for no more. An iteration is handed to
the trainer when the next one has its weights, so with `max_staleness` 1 iteration `n` has those of version `n - 1`,
whatever is faster, sampling or training. With more the version depends on time; it is recorded with every token.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

from treewise.rl.online.collecting import Sampled
from treewise.rl.tasks import RewardRunner

if TYPE_CHECKING:
    from treewise.rl.online.trainer import OnlineTrainer

JOIN_SECONDS = 10.0


class EndedError(Exception):
    """The run is over; ends the thread at the next completion."""


class Ahead:
    """The thread. All methods are for the trainer's own, but `check`.

    Attributes:
        seconds_waited: of the trainer, for rollouts, so far.

    Parameters:
        collect: samples an iteration with a version of the policy, in the thread.
        hand_over: gives the sampler the present weights, while nothing trains.
        first, last: iterations to sample, `last` not included. The policy at hand is of version `first`.
    """

    def __init__(
        self,
        collect: Callable[[int, int], Sampled],
        hand_over: Callable[[], None],
        first: int,
        last: int,
        max_staleness: int,
    ) -> None:
        self._collect, self._hand_over, self._staleness = collect, hand_over, max_staleness
        self._first, self._last = first, last
        self._version, self._sampling_version = first, -1
        self._collected: dict[int, Sampled] = {}
        self._changed = threading.Condition()
        self._is_training = self._is_over = self._is_done = False
        self._needed: int | None = None  # the version that the thread waits for
        self._error: BaseException | None = None
        self.seconds_waited = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="treewise-ahead")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._renew(self._first)
            for iteration in range(self._first, self._last):
                collected = self._collect(iteration, self._sampling_version)
                if iteration + 1 < self._last:
                    self._renew(iteration + 1)
                with self._changed:
                    self._collected[iteration] = collected
                    self._changed.notify_all()
        except BaseException as error:  # raised again where the trainer waits
            self._error = error
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    def _renew(self, iteration: int) -> None:
        """Takes the newest weights, if the trainer lets them be or the ones at hand are too old."""
        oldest = max(self._first, iteration - self._staleness)
        with self._changed:
            if self._is_training and self._sampling_version >= oldest:
                return
            self._needed = oldest
            self._changed.wait_for(lambda: self._is_over or (not self._is_training and self._version >= oldest))
            self._needed = None
            self.check()
            self._hand_over()
            self._sampling_version = self._version
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

    def take(self, iteration: int) -> Sampled:
        """What was sampled for an iteration. Raises as `wait_for`."""
        self.wait_for(iteration)
        return self._collected.pop(iteration)

    @contextmanager
    def training(self, iteration: int) -> Iterator[None]:
        """Around what changes the weights; they are of the next version afterwards. Where it fails, the run is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._needed is None or self._needed > self._version)
            self._is_training = True
        try:
            yield
        except BaseException:
            self._is_over = True  # weights in between are of no version
            raise
        with self._changed:
            self._is_training, self._version = False, iteration + 1
            self._changed.notify_all()

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Around work that needs the sampler with the newest weights, beside what the thread samples with them."""
        with self._changed:
            self._changed.wait_for(lambda: self._sampling_version == self._version or self._is_done)
            if self._sampling_version != self._version:
                self._hand_over()
                self._sampling_version = self._version
            self._is_training = True
        try:
            yield
        finally:
            with self._changed:
                self._is_training = False
                self._changed.notify_all()

    def close(self) -> bool:
        """Ends the thread; what it was sampling is lost, as by a kill. Whether it has ended."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(JOIN_SECONDS)
        return not self._thread.is_alive()


def start_ahead(trainer: "OnlineTrainer", first: int) -> Ahead:
    """The thread of a run, from an iteration on, with a state, a sampler and a count of rewards of its own."""
    loop, settings = deepcopy(trainer.loop), trainer.settings
    rewards = RewardRunner(trainer.rewards.calls, trainer.rewards.on_reward_error, trainer.rewards.extras)
    rewards.failures.update(trainer.rewards.failures)
    rollouts = replace(trainer.rollouts, sampler=trainer.sampler, rewards=rewards)

    def collect(iteration: int, version: int) -> Sampled:
        state = copy(trainer.state)
        state.global_step = iteration
        rewards.begin(state)
        rounds = replace(rollouts.rounds(loop, trainer.journal(iteration + 1), version), progress=ahead.check)
        collected = trainer.collected(rollouts, loop, iteration, rounds)
        trainer.observe(loop, collected)
        loop.failures, loop.curriculum = dict(rewards.failures), deepcopy(trainer.items.state_dict())
        return Sampled(collected, rewards.tally, rounds, deepcopy(loop))

    ahead = Ahead(collect, rollouts.hand_over, first, settings.iterations, settings.max_staleness)
    ahead.start()
    return ahead
