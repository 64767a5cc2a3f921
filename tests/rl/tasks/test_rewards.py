"""A reward that fails is set aside and counted; it is never a zero, and stops nothing unless told to."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from treewise.errors import ConfigError, TaskError
from treewise.rl.tasks import RewardFailure, RewardRequest, RewardRunner, SumTask, TaskItem

ITEM = TaskItem("sum/train/3", ({"role": "user", "content": "1 + 2 ="},), {"answer": "3"})


class Rewarding(SumTask):
    """A task whose rewards are those of a function of the text."""

    function: Callable[[str], Any]

    def rewards(self, requests: list[RewardRequest]) -> list[Any]:
        return [self.function(request.text) for request in requests]


def _task(function: Callable[[str], Any]) -> Rewarding:
    task = Rewarding()
    Rewarding.function = staticmethod(function)
    return task


def _raise(_text: str) -> float:
    raise SystemExit("bye")


FAILURES = {
    "raised": _raise,
    "not_a_number": lambda _text: float("nan"),
    "missing": lambda _text: None,
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_set_aside_and_counted(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    runner = RewardRunner()
    function = FAILURES[kind]
    task = _task(lambda text: 1.0 if text == "good" else function(text))
    results = runner.rewards(task, [RewardRequest(ITEM, text) for text in ("good", "bad", "good")])
    assert results[0] == results[2] == 1.0
    assert isinstance(results[1], RewardFailure)
    assert (results[1].kind, results[1].key) == (kind, "sum/train/3")
    assert runner.failures == {kind: 1}
    assert "set aside" in caplog.text


def test_infinite_and_textual_rewards_are_no_numbers() -> None:
    runner = RewardRunner()
    for value in (float("inf"), "high", [1.0]):
        result = runner.rewards(_task(lambda _text, value=value: value), [RewardRequest(ITEM, "")])[0]
        assert isinstance(result, RewardFailure)
        assert result.kind == "not_a_number"
    assert runner.failures["not_a_number"] == 3


def test_a_reward_that_takes_too_long_is_left_behind() -> None:
    release = threading.Event()
    runner = RewardRunner(timeout_seconds=0.05)
    task = _task(lambda text: release.wait(60) if text == "slow" else 0.5)
    results = runner.rewards(task, [RewardRequest(ITEM, "slow"), RewardRequest(ITEM, "fast")])
    release.set()
    assert isinstance(results[0], RewardFailure)
    assert results[0].kind == "timeout"
    assert results[1] == 0.5


def test_raise_stops_with_the_cause() -> None:
    def divide(_text: str) -> float:
        return 1 / 0

    runner = RewardRunner(on_reward_error="raise")
    with pytest.raises(TaskError, match="sum/train/3: reward raised: ZeroDivisionError") as caught:
        runner.rewards(_task(divide), [RewardRequest(ITEM, "")])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_settings() -> None:
    with pytest.raises(ConfigError, match="on_reward_error is 'zero'"):
        RewardRunner(on_reward_error="zero")
    with pytest.raises(ConfigError, match="time limit"):
        RewardRunner(timeout_seconds=0)
