"""Runs reward functions so that none can stop or poison the loop: what fails is set aside and counted, never a zero."""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treewise.errors import ConfigError, TaskError
from treewise.rl.tasks.protocol import RewardRequest, SingleTurnTask

logger = logging.getLogger(__name__)
OnRewardError = Literal["quarantine", "raise"]
FailureKind = Literal["raised", "not_a_number", "timeout", "missing"]


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why a rollout has no reward. Such a rollout takes no part in baselines, advantages or the update."""

    key: str
    kind: FailureKind
    message: str

    def __str__(self) -> str:
        return f"{self.key}: reward {self.kind.replace('_', ' ')}: {self.message}"


@dataclass(slots=True)
class RewardRunner:
    """Rewards with a time limit.

    A reward function runs in a thread of its own. One that takes too long is left behind (Python cannot end a thread);
    its result is ignored and its rollout is a failure. Functions are called with one rollout at a time, so that a
    failure is that of one rollout.

    Parameters:
        timeout_seconds: of one rollout; None waits for ever.
        on_reward_error: `quarantine` counts and goes on, `raise` stops with a TaskError.
    """

    timeout_seconds: float | None = 30.0
    on_reward_error: OnRewardError = "quarantine"
    failures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.on_reward_error not in ("quarantine", "raise"):
            raise ConfigError(f"on_reward_error is {self.on_reward_error!r}; choose quarantine or raise.")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ConfigError(f"the time limit of a reward is {self.timeout_seconds} seconds; it must be above 0.")

    def rewards(self, task: SingleTurnTask, requests: Sequence[RewardRequest]) -> list[float | RewardFailure]:
        """A number or a failure for each rollout.

        Raises:
            TaskError: a reward failed, with `on_reward_error="raise"`.
        """
        return [self.run(request.item.key, _one_reward, task, request) for request in requests]

    def run(self, key: str, function: Callable[..., Any], *args: Any) -> float | RewardFailure:
        """The number that `function(*args)` gives, or the failure.

        Raises:
            TaskError: it failed, with `on_reward_error="raise"`.
        """
        outcome = called(function, args, self.timeout_seconds)
        failure = outcome if isinstance(outcome, FailedCall) else None
        if failure is None:
            reward, failure = _number(outcome)
            if failure is None:
                return reward
        result = RewardFailure(key, failure.kind, failure.message)
        self.count(result, failure.cause)
        return result

    def count(self, failure: RewardFailure, cause: BaseException | None = None) -> None:
        """Counts and logs a rollout that is set aside.

        Raises:
            TaskError: with `on_reward_error="raise"`.
        """
        self.failures[failure.kind] += 1
        if self.on_reward_error == "raise":
            raise TaskError(str(failure)) from cause
        logger.warning("%s; this rollout is set aside (%d so far)", failure, self.failures.total())


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A function of the user's that raised, took too long, or gave no number."""

    kind: FailureKind
    message: str
    cause: BaseException | None = None


def called(function: Callable[..., Any], args: tuple[Any, ...], timeout_seconds: float | None) -> Any:
    """What a function returns, or a `FailedCall`; it runs in a thread of its own."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function(*args))
        except BaseException as error:  # a user's function may raise anything, SystemExit included
            results.append(FailedCall("raised", f"{type(error).__name__}: {error}", error))

    thread = threading.Thread(target=run, daemon=True, name="treewise-reward")
    thread.start()
    thread.join(timeout_seconds)
    if results:
        return results[0]
    return FailedCall("timeout", f"no answer within {timeout_seconds} seconds")


def _one_reward(task: SingleTurnTask, request: RewardRequest) -> Any:
    rewards = task.rewards([request])
    if len(rewards) != 1:
        raise ValueError(f"{len(rewards)} rewards for 1 completion")
    return rewards[0]


def _number(value: Any) -> tuple[float, FailedCall | None]:
    if value is None:
        return 0.0, FailedCall("missing", "the reward is None")
    try:
        reward = float(value)
    except (TypeError, ValueError):
        return 0.0, FailedCall("not_a_number", f"the reward is {value!r:.80}, of type {type(value).__name__}")
    if not math.isfinite(reward):
        return 0.0, FailedCall("not_a_number", f"the reward is {reward}")
    return reward, None
