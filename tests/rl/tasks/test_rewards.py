"""A reward that fails is set aside and counted; it is never a zero, and too many of them end a run."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from treewise.errors import TaskError
from treewise.rl.online.drawn import check_failures
from treewise.rl.online.journal import Journal
from treewise.rl.tasks import Calls, RewardFailure, RewardRequest, RewardRunner, RowsTask, SumTask, TaskItem, calls
from treewise.rl.tasks.rewards import RewardTally

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


def _outcomes(function: Callable[[str], Any], *texts: str, runner: RewardRunner | None = None) -> list[Any]:
    return (runner or RewardRunner()).rewards(_task(function), [RewardRequest(ITEM, text) for text in texts])[0]


def _raise(_text: str) -> float:
    raise SystemExit("bye")


FAILURES = {
    "raised": (_raise, r"test_rewards.py:\d+: SystemExit: bye"),
    "not_a_number": (lambda _text: float("nan"), "the reward is nan"),
    "missing": (lambda _text: None, "the reward is None"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_set_aside_shown_and_counted(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    runner = RewardRunner()
    function, message = FAILURES[kind]
    results = _outcomes(lambda text: 1.0 if text == "good" else function(text), "good", "bad", "good", runner=runner)
    assert results[0] == results[2] == 1.0
    assert isinstance(results[1], RewardFailure)
    assert (results[1].kind, results[1].key) == (kind, "sum/train/3")
    runner.count(results, {})
    runner.count(results, {})
    assert runner.failures == {kind: 2}
    assert len(caplog.records) == 1  # the same failure is shown once
    with pytest.raises(TaskError, match=rf"iteration 3: 2 of 6 rollouts without reward.*max_failed=0.3.*{message}"):
        check_failures(runner.tally, 0.3, "iteration 3", Journal(None))
    check_failures(runner.tally, 0.34, "iteration 3", Journal(None))


LONGEST = pytest.param(10**5000, id="digits that Python does not write")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), "high", "1", [1.0], 1e308, 10**400, LONGEST, object()])
def test_what_is_no_number_of_float32_is_set_aside(value: Any) -> None:
    result = _outcomes(lambda _text: value, "")[0]
    assert isinstance(result, RewardFailure)
    assert result.kind == "not_a_number"


def test_only_the_rollouts_that_fail_alone_are_set_aside_and_the_others_stay_a_batch() -> None:
    sizes = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        sizes.append(len(completions))
        if "bad" in completions:
            raise ValueError("bad")
        return [float(len(completions))] * len(completions)

    task = RowsTask([{"prompt": "a"}], [reward], held_out=0.0)
    texts = ["a", "bad", "b", "c"]
    outcomes = RewardRunner().rewards(task, [RewardRequest(task.item("train", 0), text) for text in texts])[0]
    assert isinstance(outcomes[1], RewardFailure)
    assert [outcomes[i] for i in (0, 2, 3)] == [3.0] * 3
    assert sizes == [4, 1, 1, 1, 1, 3]


def test_a_batch_that_fails_only_as_a_whole_is_set_aside_as_a_whole() -> None:
    task = RowsTask([{"prompt": "a"}], [lambda **_: [1.0]], held_out=0.0)
    outcomes = RewardRunner().rewards(task, [RewardRequest(task.item("train", 0), "")] * 3)[0]
    assert ["returned 1 reward for 3 completions" in str(each) for each in outcomes] == [True] * 3


def test_a_reward_that_takes_too_long_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a call has passed once it waits, and not before: the others may take their time."""
    release, waiting = threading.Event(), set[threading.Thread]()

    class Limited(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            while self.is_alive() and not (timeout and self in waiting):
                super().join(0.01)

    def reward(text: str) -> float:
        if text == "slow":
            waiting.add(threading.current_thread())
            release.wait(60)
        return 0.5

    monkeypatch.setattr(calls, "threading", SimpleNamespace(Thread=Limited, Lock=threading.Lock))
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: 0.0))
    results = _outcomes(reward, "slow", "fast", runner=RewardRunner(Calls(0.05)))
    release.set()
    assert isinstance(results[0], RewardFailure)
    assert results[0].kind == "timeout"
    assert results[1] == 0.5


def test_raise_stops_with_the_cause() -> None:
    def divide(_text: str) -> float:
        return 1 / 0

    with pytest.raises(TaskError, match=r"sum/train/3: reward raised: .*:\d+: ZeroDivisionError") as caught:
        _outcomes(divide, "", runner=RewardRunner(on_reward_error="raise"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(TaskError, match="reward missing"):
        _outcomes(lambda _text: None, "", runner=RewardRunner(on_reward_error="raise"))


def test_tallies_of_processes_add_up() -> None:
    first, second = RewardTally(2, 0, None, {"a": [1.0]}), RewardTally(3, 2, "why", {"a": [2.0], "b": [3.0]})
    first.add(second)
    assert first == RewardTally(5, 2, "why", {"a": [1.0, 2.0], "b": [3.0]})
