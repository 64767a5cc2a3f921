"""Continues rollouts side by side, turn after turn: requests of all that are ready go out as one batch, and
environments answer in threads meanwhile, so that one that takes seconds holds up no other rollout.

What is drawn depends on weights, requests and their seeds. Which requests share a batch depends, where environments
take longer than `gather_seconds`, on time: it changes logits by rounding, and not even that where the sampler gives
each request a batch of its own.
"""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from treewise.rl.branching import Branching
from treewise.rl.online.journal import Journal, completion_from_json, completion_to_json, question_of
from treewise.rl.online.rollout import Continuation, Limits
from treewise.rl.samplers import Completion, Sampler, SampleRequest
from treewise.rl.samplers.protocol import sample_in_parts
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks import RewardRunner
from treewise.rl.tasks.calls import Beside


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What the rounds of an iteration need besides its trees.

    request: what all requests have in common; its prefix is replaced. expected_tokens: of a rollout, from earlier
    iterations. episodes_at_once: environments that work at a time. gather_seconds: for so long requests that are ready
    wait for environments that have not answered; None: until all have. version: of the policy that the sampler has;
    None where nobody counts. progress: is called with the tokens of each completion. seconds: of sampling, of this
    those in which all rollouts waited for environments, and of rewards, added up.
    """

    branching: Branching
    sampler: Sampler
    book: SuccessBook
    rewards: RewardRunner
    journal: Journal
    limits: Limits
    request: SampleRequest
    expected_tokens: float | None = None
    episodes_at_once: int = 64
    gather_seconds: float | None = 0.1
    version: int | None = None
    progress: Callable[[int], None] | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"sampling": 0.0, "environments": 0.0, "reward": 0.0})


def continue_all(continuations: Sequence[Continuation], rounds: Rounds) -> None:
    """Samples continuations, turn after turn, until all have ended or were refused."""
    started = time.perf_counter()
    rounds.journal.begin_phase()
    with (
        Beside(rounds.episodes_at_once) as environments,
        Beside(getattr(rounds.sampler, "max_concurrent", 0), environments) as servers,
    ):
        _SideBySide(list(continuations), rounds, environments, servers).run()
    rounds.seconds["sampling"] += time.perf_counter() - started


@dataclass(slots=True)
class _SideBySide:
    """environments: threads that wait for them. servers: threads that wait for a server that answers several calls at
    once, each request as soon as it is ready; a sampler in this process takes batches. ready: whose next request can be
    in one.
    """

    continuations: list[Continuation]
    rounds: Rounds
    environments: Beside
    servers: Beside
    ready: list[int] = field(default_factory=list)

    def run(self) -> None:
        for index in range(len(self.continuations)):
            self._go_on(index)
        while self.ready or self._num_under_way:
            self._take_answers()
            if self.ready:
                self._sample()

    @property
    def _num_under_way(self) -> int:
        return self.environments.num_under_way + self.servers.num_under_way

    def _go_on(self, index: int) -> None:
        each = self.continuations[index]
        if each.wait is not None:
            self.environments.start((index, None), each.wait)
        elif not each.is_finished:
            self.ready.append(index)
            if self.servers.at_once:
                self._sample()

    def _take_answers(self) -> None:
        """What environments have answered: all of it where that comes soon, else what there is, or the next."""
        began, limit = time.monotonic(), self.rounds.gather_seconds
        while self._num_under_way:
            asked, is_idle = time.monotonic(), not self.servers.num_under_way
            left = None if limit is None or not self.ready else max(0.0, began + limit - asked)
            try:
                (index, request), result = self.environments.take(left)
            except queue.Empty:
                return
            finally:
                self.rounds.seconds["environments"] += time.monotonic() - asked if is_idle else 0.0
            if request is None:
                self.continuations[index].go_on()
                self._go_on(index)
            else:
                answer = self._answer(result[0][0])
                self._record([(request, answer)])
                self._take(index, answer)

    def _sample(self) -> None:
        """One batch of all that are ready; what the journal holds is not sampled again."""
        batch, self.ready = sorted(self.ready), []
        requests = [(index, self.continuations[index].request(self.rounds.request)) for index in batch]
        missing: list[tuple[int, SampleRequest]] = []
        for index, request in requests:
            answer = self.rounds.journal.recall("sample", str(request.seed), question_of(request))
            if answer is None:
                missing.append((index, request))
            else:
                self._take(index, answer)
        if self.servers.at_once:
            for index, request in missing:
                self.servers.start((index, request), partial(self.rounds.sampler.sample, [request]))
        elif missing:
            found: list[tuple[SampleRequest, Any]] = []

            def done(number: int, completions: Sequence[Completion]) -> None:
                index, request = missing[number]
                found.append((request, self._answer(completions[0])))
                self._take(index, found[-1][1])

            sample_in_parts(self.rounds.sampler, [request for _, request in missing], done)
            self._record(found)

    def _answer(self, completion: Completion) -> Any:
        return completion_to_json(replace(completion, version=self.rounds.version))

    def _record(self, found: Sequence[tuple[SampleRequest, Any]]) -> None:
        self.rounds.journal.record(
            "sample", [(str(request.seed), question_of(request), answer) for request, answer in found]
        )

    def _take(self, index: int, answer: Any) -> None:
        self.continuations[index].take(completion_from_json(answer))
        if self.rounds.progress is not None:
            self.rounds.progress(len(answer["token_ids"]))
        self._go_on(index)
