"""Continues rollouts side by side until each has its reward: requests of all that are ready go out as one batch, and
environments answer in threads meanwhile, so that one that takes seconds holds up no other rollout.

What is drawn depends on weights, requests and their seeds. Which requests share a batch depends, where environments
take longer than `gather_seconds`, on time: it changes logits by rounding, and not even that where the sampler gives
each request a batch of its own. Without environments it does not, as reward functions are waited for.
"""

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from treewise.rl.branching import Branching
from treewise.rl.online.collector import Moment
from treewise.rl.online.journal import (
    completion_from_json,
    completion_to_json,
    outcome_from_json,
    outcome_to_json,
    question_of,
)
from treewise.rl.online.rollout import Continuation, Limits
from treewise.rl.samplers import Completion, SampleRequest
from treewise.rl.samplers.batching import Batcher
from treewise.rl.tasks import RewardFailure, RewardRunner
from treewise.rl.tasks.calls import Beside
from treewise.rl.tasks.reward_functions import Logged
from treewise.rl.tasks.rewards import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What the rounds of an iteration need besides its trees.

    moment: of the run. request: what all requests have in common; its prefix is replaced. expected_tokens: of a
    rollout, from earlier iterations. episodes_at_once: environments that work at a time. gather_seconds: for so long
    requests that are ready wait for environments that have not answered; None: until all have. seconds: added up, of
    sampling, of this those in which all rollouts waited for environments, and those in which they waited for rewards
    alone.
    """

    moment: Moment
    branching: Branching
    rewards: RewardRunner | None
    limits: Limits
    request: SampleRequest
    expected_tokens: float | None = None
    episodes_at_once: int = 64
    gather_seconds: float | None = 0.1
    seconds: dict[str, float] = field(default_factory=lambda: {"sampling": 0.0, "environments": 0.0, "reward": 0.0})


Ended = Callable[[Continuation], Sequence[Continuation]]


def continue_all(continuations: Sequence[Continuation], rounds: Rounds, ended: Ended = lambda _: ()) -> None:
    """Samples continuations, turn after turn, until all have ended and got their rewards, or were refused.

    ended: is called with each of them then; what it returns is continued beside the others.

    Raises:
        TaskError: a reward failed, and the runner raises.
    """
    started, before = time.monotonic(), rounds.seconds["reward"]
    rounds.moment.journal.begin_phase()
    sampler, gather_seconds = rounds.moment.sampler, rounds.gather_seconds
    with (
        Beside(rounds.episodes_at_once) as environments,
        closing(Batcher(sampler, gather_seconds=gather_seconds)) as batcher,
    ):
        _SideBySide(rounds, ended, environments, batcher).run(continuations)
    rounds.seconds["sampling"] += time.monotonic() - started - (rounds.seconds["reward"] - before)


@dataclass(slots=True)
class _SideBySide:
    """environments: threads that wait for them, and for rewards. num_asked: requests that are not answered. answers:
    that are not in the journal. unrewarded: that ended and wait for reward functions, which get them together.
    num_rewarding: calls for rewards that are under way.
    """

    rounds: Rounds
    ended: Ended
    environments: Beside
    batcher: Batcher
    num_asked: int = 0
    answers: list[tuple[str, Any, Any]] = field(default_factory=list)
    unrewarded: list[Continuation] = field(default_factory=list)
    num_rewarding: int = 0

    def run(self, continuations: Sequence[Continuation]) -> None:
        self._go_on(continuations)
        while True:
            num_others = self.environments.num_under_way
            left = self.batcher.seconds_left(num_others)
            if left is not None and not num_others:
                self._sample()
            elif left is None and self.unrewarded and not self.num_rewarding:
                batch, self.unrewarded = sorted(self.unrewarded, key=lambda continuation: continuation.seed), []
                self._reward(batch)
            elif num_others or self.num_asked:
                self._take_answer(left)
            else:
                return

    def _go_on(self, continuations: Sequence[Continuation]) -> None:
        """Whatever comes next for each: its environment, a request, its reward, or what follows its end."""
        left = deque(continuations)
        while left:
            continuation = left.popleft()
            if continuation.wait is not None:
                self.environments.start(partial(self._waited, continuation), continuation.wait)
            elif not continuation.is_finished:
                if self._is_recalled(continuation):
                    left.append(continuation)
            elif continuation.has_ended and continuation.outcome is None and self.rounds.rewards is not None:
                answer = self.rounds.moment.journal.recall("reward", str(continuation.seed), _question(continuation))
                if answer is not None:
                    self._give(continuation, outcome_from_json(answer[0]), answer[1])
                    left.append(continuation)
                elif continuation.conversation.is_rewarded_alone:
                    self._reward([continuation])
                else:
                    self.unrewarded.append(continuation)
            else:
                left.extend(self.ended(continuation))

    def _take_answer(self, left: float | None) -> None:
        """The next one; where none comes before a batch is due, that batch."""
        asked, is_idle = time.monotonic(), not (self.batcher.is_on_servers and self.num_asked)
        waits_for = "reward" if self.num_rewarding == self.environments.num_under_way else "environments"
        try:
            then, result = self.environments.take(None if left == math.inf else left)
        except queue.Empty:
            then = None
        finally:
            self.rounds.seconds[waits_for] += time.monotonic() - asked if is_idle else 0.0
        if then is None:
            self._sample()
        else:
            then(result)

    def _waited(self, continuation: Continuation, _: None) -> None:
        continuation.go_on()
        self._go_on([continuation])

    # -- samples ------------------------------------------------------------------------------------------------------

    def _is_recalled(self, continuation: Continuation) -> bool:
        """Takes what the journal holds of its next turn; else that is asked for."""
        request = continuation.request(self.rounds.request)
        name, question = str(request.seed), question_of(request)
        answer = self.rounds.moment.journal.recall("sample", name, question)
        if answer is not None:
            self._take(continuation, completion_from_json(answer))
            return True
        self.num_asked += 1
        answered: Any = partial(self._answered, continuation, name, question)
        if self.batcher.is_on_servers:  # whose threads these are
            answered = partial(self.environments.hand_in, answered)
        self.batcher.submit(request, answered, continuation.seed)
        return False

    def _sample(self) -> None:
        """One batch, which is in the journal as a whole: a resumed run makes the same ones."""
        self.batcher.sample()
        self._record()

    def _answered(self, continuation: Continuation, name: str, question: Any, result: Any) -> None:
        self.num_asked -= 1
        if isinstance(result, BaseException):
            raise result
        completion = replace(result, version=self.rounds.moment.version)
        self.answers.append((name, question, completion_to_json(completion)))
        if self.batcher.is_on_servers:
            self._record()
        self._take(continuation, completion)
        self._go_on([continuation])

    def _record(self) -> None:
        answers, self.answers = self.answers, []
        self.rounds.moment.journal.record("sample", answers)

    def _take(self, continuation: Continuation, completion: Completion) -> None:
        continuation.take(completion)
        if self.rounds.moment.progress is not None:
            self.rounds.moment.progress(completion.num_tokens)

    # -- rewards ------------------------------------------------------------------------------------------------------

    def _reward(self, batch: Sequence[Continuation]) -> None:
        """One call, in a thread: of the environment of one rollout, or of the reward functions."""
        assert self.rounds.rewards is not None
        first, *others = (continuation.conversation for continuation in batch)
        self.num_rewarding += 1
        self.environments.start(partial(self._rewarded, batch), first.reward_call(others, self.rounds.rewards))

    def _rewarded(self, batch: Sequence[Continuation], found: tuple[Sequence[Outcome], Logged]) -> None:
        self.num_rewarding -= 1
        outcomes, logged = found
        metrics = [logged.metrics, *({} for _ in batch[1:])]  # of all of them, with the first
        rewarded = list(zip(batch, outcomes, metrics, strict=True))
        self.rounds.moment.journal.record(
            "reward",
            [(str(one.seed), _question(one), [outcome_to_json(outcome), own]) for one, outcome, own in rewarded],
        )
        for continuation, outcome, own in rewarded:
            self._give(continuation, outcome, own)
        self._go_on(batch)

    def _give(self, continuation: Continuation, outcome: Outcome, metrics: Mapping[str, list[float]]) -> None:
        """Gives a rollout that ended its reward, or sets it aside."""
        runner: Any = self.rounds.rewards
        continuation.outcome = outcome
        if isinstance(outcome, RewardFailure):
            self.rounds.moment.journal.mark()
        runner.count([outcome], metrics)


def _question(continuation: Continuation) -> list[Any]:
    """Everything that decides a reward, but the functions."""
    conversation: Any = continuation.conversation
    return [conversation.item.key, conversation.token_ids]
