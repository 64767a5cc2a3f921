"""`treewise rl --agent`, as a user gives it."""

import json

import pytest

from tests.rl.agents.plain_agents import __file__ as PLAIN
from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.cli.main import main

pytestmark = pytest.mark.xdist_group("test_agents_running")


@pytest.fixture
def run(tmp_path, capsys):
    """Runs a command; its exit code and what it printed."""
    tiny_policy(max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    tasks = "".join(json.dumps({"question": f"{number}+2?"}) + "\n" for number in range(5))
    (tmp_path / "tasks.jsonl").write_text(tasks)
    given = {
        **{"model": tmp_path / "model", "output_dir": tmp_path / "out", "use_cpu": "true", "report_to": "none"},
        **{"tasks": tmp_path / "tasks.jsonl", "chat_template": "chatml", "iterations": 2, "max_new_tokens": 8},
        **{"trees_per_iteration": 1, "eval_items": 1, "agent_settings.episodes": 2, "save_every": 1},
        "agent": f"{PLAIN}:drawn_reward",
    }

    def call(*flags, **settings):
        keys = {key: value for key, value in {**given, **settings}.items() if value is not None}
        words = [str(word) for key, value in keys.items() for word in (f"--{key}", value)]
        code = main(["rl", *words, *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_an_agent_is_trained_and_goes_on(run, tmp_path):
    code, out, err = run(iterations=1)
    assert code == 0, err
    assert "episodes     2 of each of 1 task, 8 tokens a reply at most" in out
    assert "iteration 1/1: reward" in out
    code, out, err = run("--resume")
    assert code == 0, err
    assert "iteration 2/2: reward" in out
    assert len((tmp_path / "out" / "rollouts" / "iteration-00002.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"agent": f"{PLAIN}:nobody"}, "cannot be loaded (is it a function, or a command?)"),
        ({"agent": None}, "agent_settings are given without an agent"),
        ({"agent_settings.episode": 3}, "unknown setting agent_settings.episode. Did you mean 'episodes'?"),
        ({"agent_settings.episodes": 1}, "episodes"),
        ({"tokens_per_iteration": 100}, "agent_settings.episodes: null"),
        ({"tasks": "sum"}, "with an agent give a file of rows"),
        ({"branching": "random"}, "branching is given with an agent"),
        ({"curriculum": "gain"}, "measures prompts"),
        ({"tasks_settings.held_out": 1.0}, "held_out"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_sampled(run, settings, words, tmp_path):
    code, _, err = run("--dry_run", **settings)
    assert code == 2
    assert words in err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_loads_the_agent(run, tmp_path):
    code, out, _ = run("--dry_run")
    assert code == 0
    assert f"agent        {PLAIN}:drawn_reward" in out
    assert not (tmp_path / "out").exists()
