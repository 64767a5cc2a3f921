"""Rewards of rollouts that ended: what fails is set aside, shown and counted, never a zero, and too much of it ends the
run.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from treewise.data.io.field_checks import printable
from treewise.errors import TaskError, num
from treewise.rl.tasks.calls import Calls, FailedCall, FailureKind, Job
from treewise.rl.tasks.protocol import RewardRequest, SingleTurnTask
from treewise.rl.tasks.reward_functions import Logged, number

if TYPE_CHECKING:
    from treewise.rl.tasks.episode import EnvironmentEpisode

logger = logging.getLogger(__name__)
MAX_FAILED = 0.5  # the share of rollouts that may have no reward, where nothing else is asked for
MAX_SHOWN = 20  # different failures that are logged; all are counted
_ALONE = 2.0  # time limits that finding the rollouts of a batch that fail may take


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a rollout has no reward. Such a rollout takes no part in baselines, advantages or the update."""

    key: str
    kind: FailureKind
    message: str

    def __str__(self) -> str:
        return f"{self.key}: reward {self.kind.replace('_', ' ')}: {self.message}"


Outcome = float | RewardFailure


@dataclass(slots=True)
class RewardTally:
    """Of the rewards of an iteration, or of recorded rollouts. first: the first failure, as text. metrics: that reward
    functions logged. kinds: how many failed, by kind.
    """

    num_rollouts: int = 0
    num_failed: int = 0
    first: str | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, other: "RewardTally") -> None:
        """Takes in the tally of another process."""
        self.num_rollouts += other.num_rollouts
        self.num_failed += other.num_failed
        self.first = self.first or other.first
        self.kinds += other.kinds
        for name, values in other.metrics.items():
            self.metrics.setdefault(name, []).extend(values)


def too_many_failed(tally: RewardTally, max_failed: float) -> str | None:
    """What is wrong where more than `max_failed` of the rollouts, sampled or recorded, have no reward; None where few
    enough have none: these are set aside and counted.
    """
    if tally.num_failed <= max_failed * tally.num_rollouts:
        return None
    return (
        f"{tally.num_failed} of {num(tally.num_rollouts, 'rollout')} without reward, more than max_failed="
        f"{max_failed:g} of them. The first: {tally.first}."
    )


@dataclass(slots=True)
class RewardRunner:
    """Computes rewards, a batch of rollouts at a time.

    Where a call for a batch fails, each rollout is tried alone; those that fail alone are set aside, and the others are
    given to the function once more as one batch. Where none fails alone, or there is no time left for it (twice the
    time limit), the whole batch is set aside.

    Parameters:
        calls: how functions are called: time limit, worker processes.
        on_reward_error: `quarantine` counts and goes on, `raise` stops with a TaskError.
        extras: a file that gets what reward functions log by `log_extra`, a line for each rollout.

    Attributes:
        failures: by kind, of the whole run. tally: of the present iteration.
        trainer_state: that reward functions get, as from TRL's trainers.
    """

    calls: Calls = field(default_factory=Calls)
    on_reward_error: Literal["quarantine", "raise"] = "quarantine"
    extras: Path | None = None
    failures: Counter[str] = field(default_factory=Counter)
    tally: RewardTally = field(default_factory=RewardTally)
    trainer_state: Any = None
    _shown: set[str] = field(default_factory=set, repr=False)

    def rewards(self, task: SingleTurnTask, requests: Sequence[RewardRequest]) -> tuple[list[Outcome], Logged]:
        """A number or a failure for each rollout, and what reward functions logged.

        Raises:
            TaskError: a reward failed, with `on_reward_error="raise"`.
        """
        if not requests:
            return [], Logged()
        ((outcomes, logged),) = self._called(task, [requests])
        if isinstance(outcomes, FailedCall):
            if self.on_reward_error == "raise":
                raise TaskError(str(_failure(requests[0].item.key, outcomes))) from outcomes.cause
            outcomes, logged = self._without_culprits(task, requests, outcomes)
        if self.extras is not None and logged.columns:
            self._write_extras(self.extras, requests, logged)
        return self._checked([request.item.key for request in requests], outcomes), logged

    def of_episodes(self, episodes: Sequence["EnvironmentEpisode"]) -> list[Outcome]:
        """What the environments of finished episodes give, or why there is nothing.

        Raises:
            ConfigError: an environment without `get_reward`.
            TaskError: a reward failed, with `on_reward_error="raise"`.
        """
        jobs = [episode.reward_job() for episode in episodes if episode.failure is None]
        found = iter(self.calls.run_together(jobs))
        outcomes = [next(found) if episode.failure is None else episode.failure for episode in episodes]
        return self._checked([f"{episode.item.key}, episode {episode.name}" for episode in episodes], outcomes)

    def begun(self, trainer_state: object, failures: Mapping[str, int]) -> "RewardRunner":
        """A runner with a tally of its own, which shares calls and what was logged. failures: of the run so far."""
        return replace(self, failures=Counter(failures), tally=RewardTally(), trainer_state=trainer_state)

    def count(self, outcomes: Sequence[Outcome], metrics: Mapping[str, Sequence[float]]) -> None:
        """Counts rewards, new ones or recorded ones, and logs each failure that is unlike those before."""
        failed = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
        lists = {name: list(values) for name, values in metrics.items()}
        kinds = Counter[str](failure.kind for failure in failed)
        self.tally.add(RewardTally(len(outcomes), len(failed), str(failed[0]) if failed else None, lists, kinds))
        for failure in failed:
            self.failures[failure.kind] += 1
            what = f"{failure.kind} {failure.message}"
            if what not in self._shown and len(self._shown) < MAX_SHOWN:
                self._shown.add(what)
                logger.warning("%s; this rollout is set aside (%d so far)", failure, self.failures.total())

    def close(self) -> None:
        """Ends worker processes."""
        self.calls.close()

    def _called(
        self, task: SingleTurnTask, batches: Sequence[Sequence[RewardRequest]], total_seconds: float | None = None
    ) -> list[tuple[list[Any] | FailedCall, Logged]]:
        """What each batch gets, or the call for it that failed; the calls for all batches go out together."""
        functions, state = getattr(task, "functions", None), self.trainer_state
        if self.calls.workers and state is not None:
            state = SimpleNamespace(**vars(state))  # its class would import transformers into each worker
        jobs = [
            [Job(_rewards_of_task, (task, list(requests)), type(task).rewards)]
            if functions is None
            else functions.jobs(requests, state)
            for requests in batches
        ]
        results = iter(self.calls.run_all([job for own in jobs for job in own], total_seconds))
        found: list[tuple[list[Any] | FailedCall, Logged]] = []
        for own in jobs:
            answers = [next(results) for _ in own]
            failed = next((answer for answer in answers if isinstance(answer, FailedCall)), None)
            if failed is not None or functions is None:
                found.append((failed or answers[0], Logged()))
            else:
                found.append(functions.combined(answers))
        return found

    def _without_culprits(
        self, task: SingleTurnTask, requests: Sequence[RewardRequest], failed: FailedCall
    ) -> tuple[list[Any], Logged]:
        everything: list[Any] = [failed] * len(requests)
        if len(requests) == 1:
            return everything, Logged()
        limit = self.calls.timeout_seconds
        tried = self._called(task, [[request] for request in requests], None if limit is None else _ALONE * limit)
        alone = [outcome for outcome, _ in tried]
        good = [index for index, outcome in enumerate(alone) if not isinstance(outcome, FailedCall)]
        if not good or len(good) == len(requests):
            return everything, Logged()
        ((outcomes, logged),) = self._called(task, [[requests[index] for index in good]])
        if isinstance(outcomes, FailedCall):
            return everything, Logged()
        result = list(alone)
        for index, outcome in zip(good, outcomes, strict=True):
            result[index] = outcome
        own = {name: dict(zip(good, values, strict=False)) for name, values in logged.columns.items()}
        logged.columns = {name: [values.get(index) for index in range(len(requests))] for name, values in own.items()}
        return result, logged

    def _checked(self, keys: Sequence[str], outcomes: Sequence[Any]) -> list[Outcome]:
        result: list[Outcome] = []
        for key, outcome in zip(keys, outcomes, strict=True):
            failed = _failure(key, outcome) if isinstance(outcome, FailedCall) else outcome
            if isinstance(failed, RewardFailure) and self.on_reward_error == "raise":
                raise TaskError(str(failed)) from getattr(outcome, "cause", None)
            result.append(failed)
        return result

    def _write_extras(self, path: Path, requests: Sequence[RewardRequest], logged: Logged) -> None:
        columns = {name: values for name, values in logged.columns.items() if len(values) == len(requests)}
        if not columns:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            for index, request in enumerate(requests):
                own = {name: values[index] for name, values in columns.items()}
                row = {"item": request.item.key, "completion": request.text, **own}
                stream.write(json.dumps(row, default=printable) + "\n")


def _rewards_of_task(task: SingleTurnTask, requests: list[RewardRequest]) -> list[float | FailedCall]:
    rewards = list(task.rewards(requests))
    if len(rewards) != len(requests):
        raise ValueError(f"{task.name} returned {len(rewards)} rewards for {len(requests)} completions")
    return [number(reward, "the reward is") for reward in rewards]


def _failure(key: str, failed: FailedCall) -> RewardFailure:
    return RewardFailure(key, failed.kind, failed.message)
