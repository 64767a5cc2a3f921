"""`treewise curriculum`: every signal gets a verdict, or none where nothing was measured."""

import pytest

from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.cli.main import main


@pytest.fixture
def curriculum(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = main(["curriculum", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_tasks_are_sampled_and_signals_are_not_judged_by_rewards_that_are_equal(curriculum, tmp_path):
    tiny_policy().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    small = ("--items", 4, "--rollouts", 4, "--max_new_tokens", 4, "--chat_template", "chatml")
    code, out, err = curriculum("sum", "--model", "model", *small, "--tasks_settings", "{max_number: 20}")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("4 tasks, 16 rollouts (64 generated tokens)")
    # A random policy solves none of them.
    assert lines[-1].startswith("not measurable here: angle, intra, inter, learnability; rewards differ within no task")
    assert "useless" not in out
    for settings, message in (("7", "is not a mapping"), ("[", "is not valid YAML")):
        code, _, err = curriculum("sum", "--model", "model", "--tasks_settings", settings)
        assert code == 2
        assert message in err
