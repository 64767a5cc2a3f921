"""Calls of the user's functions: in worker processes nothing can hang or end the run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from tests.rl.tasks.test_episode import branch_of, byte_tokenizer, call, reward_of, start_episode, take_turn
from treewise.errors import TaskError
from treewise.rl.online.tasks_by_name import task_named
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.tasks import Calls, RewardRequest, RewardRunner, RowsTask
from treewise.rl.tasks.calls import described, place_of

pytest.importorskip("pebble")
FILE = Path(__file__).parent / "user_rewards.py"


@pytest.fixture(scope="module")
def calls() -> Iterator[Calls]:
    found = Calls(2.0, workers=1)
    yield found
    found.close()


def outcomes(calls: Calls, name: str, *prompts: str) -> tuple[list[Any], Any]:
    task = RowsTask([{"prompt": prompt} for prompt in prompts], [f"{FILE}:{name}"], held_out=0.0)
    requests = [RewardRequest(task.item("train", index), "") for index in range(len(prompts))]
    return RewardRunner(calls, trainer_state=TrainerState(global_step=5)).rewards(task, requests)


@pytest.mark.slow
def test_workers_are_killed_and_the_others_are_rewarded(calls: Calls) -> None:
    found, _ = outcomes(calls, "loops", "a", "bad", "b")
    assert [found[0], found[2]] == [2.0, 2.0]
    assert "user_rewards.py:7: no answer within 2.0 seconds" in str(found[1])
    found, _ = outcomes(calls, "ends_its_process", "a")
    assert "user_rewards.py:14: it ended its process, exit code 7" in str(found[0])
    found, logged = outcomes(calls, "logs", "a", "b")
    assert found == [1.0, 1.0]
    assert logged.columns == {"prompt": ["a", "b"]}
    assert logged.metrics["step"] == [5.0]


@pytest.mark.slow
def test_workers_that_cannot_start_are_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool starts them again and again: it took 120 seconds, and the reward was blamed."""
    monkeypatch.setattr("treewise.rl.tasks.calls._FILES", {})  # the workers of no other test load this file
    file = tmp_path / "only_here.py"
    file.write_text(
        "import multiprocessing\n"
        "if multiprocessing.parent_process() is not None:\n    raise OSError('not in a worker')\n"
        "def reward(prompts, **columns):\n    return [1.0] * len(prompts)\n"
    )
    task = RowsTask([{"prompt": "a"}], [f"{file}:reward"], held_out=0.0)
    found = Calls(2.0, workers=1)
    failed, _ = RewardRunner(found).rewards(task, [RewardRequest(task.item("train", 0), "")])
    assert "the worker processes do not start: one ended with exit code 1" in str(failed[0])
    found.close()


@pytest.mark.slow
def test_environments_live_in_workers(calls: Calls) -> None:
    task: Any = task_named(f"{FILE}:Counter", {"start": 1})
    chat = ChatTokens(byte_tokenizer(), "chatml")
    episode = start_episode(task, task.item("train", 3), chat, calls)
    take_turn(episode, call("add", number=5))
    branch = branch_of(episode, 1)
    take_turn(branch, call("add", number=2))
    assert (reward_of(episode, RewardRunner(calls)), reward_of(branch, RewardRunner(calls))) == (12.0, 14.0)
    take_turn(episode, call("stop"))
    assert "tool stop of turn 1" in str(reward_of(episode, RewardRunner(calls)))
    locked: Any = task_named(f"{FILE}:Locked")
    with pytest.raises(TaskError, match=r"cannot pickle.*must be picklable"):
        start_episode(locked, locked.item("train", 0), chat, calls)


def test_places_are_those_of_the_user() -> None:
    def fails() -> None:
        [][0]

    class Called:
        def __call__(self) -> None: ...

    with pytest.raises(IndexError) as caught:
        fails()
    line = fails.__code__.co_firstlineno + 1
    assert described(caught.value).endswith(f"test_calls.py:{line}: IndexError: list index out of range")
    assert described(ValueError("a\nb"), fails).endswith(f":{fails.__code__.co_firstlineno}: ValueError: a\\nb")
    assert place_of(Called()).endswith(f"test_calls.py:{Called.__call__.__code__.co_firstlineno}: ")
    assert place_of(len) == ""
