"""Tasksets of `verifiers`: prompts, tools and rewards are the package's own, and trees train on them."""

import json
import sys
from pathlib import Path

import pytest

from tests.rl.online.helpers import TOKENIZER
from tests.rl.tasks.test_episode import branch_of, start_episode, take_turn
from treewise.errors import ConfigError
from treewise.rl.online.tasks_by_name import task_named
from treewise.rl.tasks import ChatTokens, RewardRunner

vf = pytest.importorskip("verifiers.v1", reason="pip install 'verifiers>=0.4,<0.5'")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    yield
    for name in ("letter_count", "adder_tools"):
        sys.modules.pop(name, None)


def test_a_taskset_of_one_turn_has_its_own_rewards():
    task = task_named("verifiers:letter-count")
    assert (task.num_items("train"), task.num_items("held_out")) == (18, 2)
    items = [task.item("train", index) for index in range(3)]
    assert items[2].prompt == ({"role": "user", "content": "Say 2"},)
    episodes = [start_episode(task, item, ChatTokens(TOKENIZER, "chatml")) for item in items]
    for episode, text in zip(episodes, ["0", "nothing", "it is 2"], strict=True):
        take_turn(episode, text)
    assert RewardRunner().of_episodes(episodes) == [2.0, 0.0, 2.0]  # weight 2; the metric counts nothing


def test_tools_are_called_and_seen_by_the_rewards():
    task = task_named("verifiers:adder_tools", {"max_turns": 3})
    episode = start_episode(task, task.item("train", 4), ChatTokens(TOKENIZER, "chatml"))
    text = TOKENIZER.decode(episode.token_ids)
    assert "Use the tool." in text
    assert "Adds two numbers." in text
    call = json.dumps({"name": "add", "arguments": {"a": 4, "b": 1}})
    for turn in (f"<tool_call>{call}</tool_call>", "It is 5."):
        branch = branch_of(episode, episode.num_turns)  # played again
        take_turn(episode, turn)
    assert "<tool_response>\n5\n" in TOKENIZER.decode(episode.token_ids)
    assert branch.token_ids == episode.token_ids[: len(branch.token_ids)]
    take_turn(branch, "6")
    assert RewardRunner().of_episodes([episode, branch]) == [1.5, 0.5]


@pytest.mark.parametrize("name", ["letter-count", "adder_tools"])
def test_a_run_from_the_command(name, run_command):
    logs = run_command(f"verifiers:{name}")
    assert logs["num_rollouts"] > 2
    assert logs["failed_rollouts"] == 0


def test_what_the_loop_does_not_have_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"verifiers:nowhere: taskset 'nowhere' not found"):
        task_named("verifiers:nowhere")
    import letter_count

    monkeypatch.setattr(letter_count.LetterTask, "NEEDS_CONTAINER", True)
    with pytest.raises(ConfigError, match="needs a container"):
        task_named("verifiers:letter-count")
