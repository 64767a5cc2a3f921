"""Games of `textarena`: a game is a function of its seed, whatever other games do meanwhile."""

import copy
import random

import pytest

from treewise.errors import ConfigError
from treewise.rl.online.tasks_by_name import task_named
from treewise.rl.tasks.environment import state_method

pytestmark = [pytest.mark.environments, pytest.mark.filterwarnings("ignore")]  # of the package

NAME = "textarena:GuessTheNumber-v0"


def played(game, moves):
    return [game.play(f"[{move}]") for move in moves]


def test_games_of_different_seeds_do_not_meet_and_copies_go_on():
    task = task_named(NAME)
    alone, one, other = (task.environment() for _ in range(3))
    assert state_method(one) == "deepcopy"
    before = random.getstate()
    first = alone.reset(seed=4)
    told = played(alone, (3, 18))
    one.reset(seed=4)
    other.reset(seed=7)
    assert (first, told[0]) == (first, played(one, (3,))[0])
    played(other, (10,))
    branch = copy.deepcopy(one)
    assert played(one, (18,)) == played(branch, (18,)) == told[1:]
    assert random.getstate() == before
    assert "Guess The Number" in first
    assert "Guess The Number" not in told[0]  # what was said before is not repeated


def test_the_reward_is_the_games():
    game = task_named(NAME).environment()
    for seed in range(3):
        game.reset(seed=seed)
        for number in range(1, 11):
            if not game.done:
                game.play(f"[{number}]")
        assert game.done or game.get_reward() == 0
        assert 0 <= game.get_reward() <= 1


def test_a_run_from_the_command(run_command):
    logs = run_command(NAME, **{"tasks_settings.max_turns": 3, "tokens_per_iteration": 128})
    assert logs["num_rollouts"] > 2
    assert logs["failed_rollouts"] == 0


def test_a_game_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="textarena:Nothing-v9"):
        task_named("textarena:Nothing-v9")
