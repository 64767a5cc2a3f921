"""The command `treewise rl --tasks` on a tiny model."""

import json

import pytest

from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.cli.main import main


@pytest.fixture
def run_command(tmp_path, capsys):
    """Runs two iterations, and the second again from the checkpoint of the first; the figures of the last."""
    tiny_policy(max_position_embeddings=4096).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    given = {
        **{"model": tmp_path / "model", "output_dir": tmp_path / "out", "use_cpu": "true", "report_to": "none"},
        **{"chat_template": "chatml", "trees_per_iteration": 2, "tokens_per_iteration": 96, "max_new_tokens": 16},
        **{"max_tokens": 64, "eval_items": 1, "branching": "turns", "branching_settings.roots": 2, "save_every": 1},
    }

    def call(tasks, **settings):
        for iterations, flags in ((1, []), (2, ["--resume"])):
            keys = {**given, **settings, "tasks": tasks, "iterations": iterations}
            words = [str(word) for key, value in keys.items() for word in (f"--{key}", value)]
            code = main(["rl", *words, *flags])
            said = capsys.readouterr()
            assert code == 0, said.err
            assert f"iteration {iterations}/{iterations}: reward" in said.out
        return json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"][-1]

    return call
