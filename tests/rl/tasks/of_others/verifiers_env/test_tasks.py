"""Environments of `verifiers`: prompts, tools, stops and rewards are the package's own, and trees train on them."""

import json
import logging
import os
import signal
import threading

import pytest

from tests.rl.online.helpers import TOKENIZER
from tests.rl.tasks.test_episode import branch_of, call, reward_of, start_episode, take_turn, text_of
from treewise.errors import ConfigError, TaskError
from treewise.rl.online.tasks_by_name import task_named
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.tasks import RewardFailure

pytestmark = [pytest.mark.environments, pytest.mark.xdist_group("verifiers")]


@pytest.fixture(scope="module")
def named():
    """Tasks by name and settings; each has a process, which tests share."""
    made = {}

    def call(name, **settings):
        key = json.dumps([name, settings])
        if key not in made:
            made[key] = task_named(f"verifiers:{name}", settings)
        return made[key]

    return call


def begin(task, number=0):
    return start_episode(task, task.item("train", number), ChatTokens(TOKENIZER, "chatml"))


def played(task, *turns, number=0):
    """An episode of these turns, and its reward."""
    episode = begin(task, number)
    for turn in turns:
        take_turn(episode, turn)
    return episode, reward_of(episode)


def answers(episode):
    return [message["content"] for message in episode.messages if message["role"] in ("tool", "user")]


# -- one turn ---------------------------------------------------------------------------------------------------------


def test_a_task_of_one_turn_has_its_own_rewards(named):
    task = named("letter-count")
    assert (task.num_items("train"), task.num_items("held_out")) == (18, 2)
    assert begin(task, 2).messages == [{"role": "user", "content": "Say 2"}]
    found = [played(task, text, number=n)[1] for n, text in enumerate(["0", "nothing", "it is 2"])]
    assert found == [2.0, 0.0, 2.0]  # weight 2; the metric counts nothing


def test_programs_and_time_limits_of_rewards_run(named, caplog):
    with caplog.at_level(logging.WARNING):
        task = task_named("verifiers:files_and_sums")
    assert "same_file, setup, finalize of its tasks run in a folder of this machine" in caplog.text
    assert "same_number" not in caplog.text
    for text, reward in (("it is \\boxed{3/2}", 3.0), ("3/2", 1.0), ("\\boxed{6/4}", 2.0), ("\\boxed{5}", 0.0)):
        assert played(task, text, number=3)[1] == reward


# -- tools ------------------------------------------------------------------------------------------------------------


def test_tools_share_the_state_of_their_episode_alone(named):
    task = named("rooms_with_keys")
    episode, other = begin(task, 4), begin(task, 4)  # goal 5
    for name in ("map_look", "rooms_look", "rooms_wait", "rooms_walk"):
        assert f'"name": "{name}"' in text_of(episode)
    take_turn(episode, call("rooms_walk", steps=2) + call("rooms_look"))
    take_turn(other, call("rooms_look") + call("map_look"))
    assert answers(episode)[1:] == ["now 2", "room 2 of 6"]
    assert answers(other)[1:] == ["room 0 of 6", "map 1"]  # the taskset's toolset is set up once
    branch = branch_of(episode, 1)  # played again
    take_turn(branch, call("rooms_look"))
    assert answers(branch)[-1] == "room 2 of 6"
    take_turn(episode, call("rooms_walk", steps=3))
    assert (episode.end_reason, reward_of(episode)) == ("done", 1.5)  # stopped: arrived
    take_turn(other, "I give up.")
    assert (other.end_reason, reward_of(other)) == ("done", 1.0)  # two looks of weight 0.5
    take_turn(branch, call("rooms_walk", steps=9))
    assert reward_of(branch) == 0.5


def test_calls_that_cannot_be_carried_out_are_told(named):
    task = named("rooms_with_keys")
    episode = begin(task)
    take_turn(episode, call("rooms_fly") + "<tool_call>{nonsense</tool_call>" + call("rooms_walk", steps="far"))
    unknown, unread, bad = answers(episode)[1:]
    assert unknown == "error: unknown tool 'rooms_fly'"
    assert "the call is not JSON" in unread
    assert "rooms_walk" not in bad
    assert "valid integer" in bad


def test_a_tool_that_blocks_holds_up_no_other_episode(named, tmp_path):
    os.mkfifo(tmp_path / "bell")
    task = named("rooms_with_keys")
    slow, quick = begin(task), begin(task)
    turn = call("rooms_wait", path=str(tmp_path / "bell"))
    waits = threading.Thread(target=take_turn, args=(slow, turn))
    waits.start()
    take_turn(quick, call("rooms_look"))
    assert answers(quick)[-1] == "room 0 of 2"
    (tmp_path / "bell").write_text("rung")
    waits.join()
    assert answers(slow)[-1] == "heard rung"


# -- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "settings", "condition"),
    [
        (["Done."], {}, "agent_completed"),
        ([call("bell_ring") + call("bell_alarm")], {}, "wants_alarm"),
        ([call("bell_ring"), "STOP " + call("bell_ring")], {}, "says_stop"),
        (
            [call("bell_ring")] * 2,
            {"task": {"stops": {"long_talk": {"fn": "stops_of_all_kinds:long_talk"}}}},
            "long_talk",
        ),
        ([call("bell_ring")], {"env": {"agent": {"max_turns": 1}}}, "max_turns"),
        ([call("bell_ring")], {"max_turns": 1}, "max_turns"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_stops_end_an_episode(named, turns, settings, condition):
    task = named("stops_of_all_kinds", **settings)
    episode, reward = played(task, *turns)
    assert episode.end_reason == ("max_turns" if "max_turns" in settings else "done")
    known = ["agent_completed", "wants_alarm", "says_stop", "long_talk", "max_turns"]
    assert known[int(reward)] == condition


def test_a_turn_that_is_cut_off_is_scored(named):
    task = named("letter-count")
    episode = begin(task, 3)
    take_turn(episode, "3 and", "length")
    assert (episode.end_reason, reward_of(episode)) == ("length", 2.0)


def test_an_episode_that_a_limit_ends_between_turns_is_scored(named):
    episode = begin(named("stops_of_all_kinds"))
    take_turn(episode, call("bell_ring"))
    assert episode.end_reason is None
    assert reward_of(episode) == 4.0  # as at max_turns


# -- environments with a run of their own -----------------------------------------------------------------------------


def test_a_scripted_user_talks_with_the_policy(named):
    task = named("scripted_user", env={"bonus": 5.0})
    episode = begin(task, 7)
    assert episode.messages == [{"role": "system", "content": "Repeat."}, {"role": "user", "content": "Say 7."}]
    take_turn(episode, "7")
    branch = branch_of(episode, 1)
    for word in ("a", "c"):
        take_turn(episode, word)
    assert answers(episode) == ["Say 7.", "Say a.", "Say b."]
    assert (episode.end_reason, reward_of(episode)) == ("done", 8.0)  # first, two right, the bonus of finalize
    take_turn(branch, "no")  # a stop of the task
    assert (branch.end_reason, reward_of(branch)) == ("done", 2.0)


def test_sampled_tokens_stay_as_they_were_sampled(named):
    episode = begin(named("scripted_user"), 1)
    sampled = [[65, 66, 67], [68, 200, 199], [70]]
    for ids in sampled:
        episode.begin_turn([*ids, TOKENIZER.eos_token_id], "stop")()
        episode.end_turn()
    starts = episode.turn_starts
    assert [episode.token_ids[at : at + len(ids)] for at, ids in zip(starts, sampled, strict=True)] == sampled


def test_what_fails_is_no_zero(named):
    for form, text in (
        ("twice", "the environment runs its solver more than once: an episode is one trajectory"),
        ("raise last", "ValueError: lost the board"),
        ("no score", "rewards without a value: one (agent_completed)"),
    ):
        _, reward = played(named("twice", env={"form": form}), "Go.")
        assert isinstance(reward, RewardFailure)
        assert text in reward.message
    with pytest.raises(TaskError, match=r"row 0: the environment cannot be reset: .*ValueError: no game today"):
        begin(named("twice", env={"form": "raise first"}))
    assert played(named("twice", env={"form": "once"}), "Go.")[1] == 1.0


# -- what is not served -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("nowhere", {}, "taskset 'nowhere' not found"),
        ("odd_forms", {"form": "empty"}, "has no tasks"),
        ("odd_forms", {"processes": 0}, "processes is 0"),
        ("odd_forms", {"num_tasks": "many"}, "num_tasks is 'many'"),
    ],
)
def test_what_is_not_there_is_an_error(name, settings, text):
    with pytest.raises(ConfigError, match=f"verifiers:{name}: .*{text}"):
        task_named(f"verifiers:{name}", settings)


def test_two_tools_of_one_name_are_an_error_before_a_turn(named):
    task = named("odd_forms", form="TwoOfOneName")
    with pytest.raises(TaskError, match="two tools are called look; give one toolset another TOOL_PREFIX"):
        begin(task, 2)


# -- the process ------------------------------------------------------------------------------------------------------


def test_a_process_that_dies_is_named(named):
    task = task_named("verifiers:letter-count", {"processes": 2})
    first, second = begin(task), begin(task)
    os.kill(first.environment._process._process.pid, signal.SIGKILL)
    take_turn(first, "0")
    assert first.end_reason == "failed"
    assert "its process has ended (exit code -9)" in reward_of(first).message
    take_turn(second, "0")
    assert reward_of(second) == 2.0


def test_a_process_ends_with_its_task_and_outlives_signals_of_the_trainer():
    task = task_named("verifiers:letter-count")
    episode = begin(task)
    process = episode.environment._process._process
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    take_turn(episode, "0")
    assert reward_of(episode) == 2.0
    del task, episode
    assert process.wait(30) == 0


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["letter-count", "rooms_with_keys", "scripted_user", "files_and_sums"])
def test_a_run_from_the_command(name, run_command):
    logs = run_command(f"verifiers:{name}")
    assert logs["num_rollouts"] > 2
    assert logs["failed_rollouts"] == 0
