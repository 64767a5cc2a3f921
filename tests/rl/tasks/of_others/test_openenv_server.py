"""An environment on a server of OpenEnv: sessions, rewards of steps, branches that are played again or not at all."""

import logging

import pytest

from tests.rl.online.helpers import new_trainer, tiny_policy
from tests.rl.online.test_continuing import Scripted
from treewise.rl.online import growing
from treewise.rl.online.tasks_by_name import task_named
from treewise.rl.tasks.environment import state_method

pytestmark = [pytest.mark.environments, pytest.mark.filterwarnings("ignore")]  # of the package


def test_a_session_is_an_episode(echo_url):
    task = task_named(f"openenv:{echo_url}", {"observation": "text"})
    one, other = task.environment(), task.environment()
    assert (one.reset(seed=6), other.reset(seed=8)) == ("begin 6", "begin 8")
    assert [one.act("a"), other.act("b"), one.act("c")] == ["1: a", "1: b", "2: c"]
    assert (state_method(one), one.done) == ("replay", False)
    one.act("d")
    assert (one.done, one.get_reward(), other.get_reward()) == (True, 1.5, 0.5)


@pytest.mark.parametrize("replay", [True, False])
def test_a_run_branches_within_episodes_or_at_their_start(replay, echo_url, tmp_path, caplog):
    growing._say_once.cache_clear()
    task = task_named(f"openenv:{echo_url}", {"observation": "text", "replay": replay})
    run = {"branching": "turns", "branching_settings": {"roots": 2}, "tokens_per_iteration": 60, "max_new_tokens": 40}
    with caplog.at_level(logging.WARNING):
        trainer = new_trainer(
            *(tmp_path / "run", task),
            sampler=Scripted(),
            model=tiny_policy(max_position_embeddings=2048),
            iterations=1,
            eval_every=0,
            **run,
        )
        logs = trainer.train()
    assert (logs["reward"], logs["failed_rollouts"], logs["refused_branches"]) == (1.5, 0, 0)
    assert (logs["num_branches"] > 0) == replay
    assert ("branch at their prompts alone" in caplog.text) == (not replay)


def test_a_run_from_the_command(echo_url, run_command):
    logs = run_command(f"openenv:{echo_url}", **{"tasks_settings.observation": "text", "tokens_per_iteration": 160})
    assert logs["num_rollouts"] > 2
    assert logs["failed_rollouts"] == 0
