"""`treewise curriculum`: on tasks, on recorded rollouts and on rows to imitate."""

import json

import pytest

from tests.cli.commands.test_rl import make_rows
from tests.cli.helpers import save_tiny_model, write_rows
from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.cli.main import main
from treewise.rl.curriculum.self_check import CheckReport


@pytest.fixture
def curriculum(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = main(["curriculum", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_tasks_are_sampled_and_every_signal_gets_a_verdict(curriculum, tmp_path):
    tiny_policy().save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    small = ("--items", 4, "--rollouts", 4, "--max_new_tokens", 4, "--chat_template", "chatml")
    code, out, err = curriculum("sum", "--model", "model", *small, "--tasks_settings", "{max_number: 20}")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("4 tasks, 16 rollouts (64 generated tokens)")
    assert lines[-1].startswith("useless here: ")
    assert "learnability" in lines[-1]
    for settings, message in (("7", "is not a mapping"), ("[", "is not valid YAML")):
        code, _, err = curriculum("sum", "--model", "model", "--tasks_settings", settings)
        assert code == 2
        assert message in err


def test_recorded_rollouts_and_rows_to_imitate(curriculum, tmp_path):
    save_tiny_model(tmp_path / "model")
    rows = make_rows(num_groups=5)
    write_rows(tmp_path / "rollouts.jsonl", rows)
    code, out, err = curriculum("rollouts.jsonl", "--model", "model", "--json", "--max_tokens", 16)
    assert code == 0, err
    values = json.loads(out)
    report = CheckReport.from_dict(values)
    assert values["useless"] == report.useless
    assert {each.target for each in report.checks} == {"gradient_norm", "variance"}
    assert (report.num_tasks, report.num_rollouts, report.num_varied) == (5, 15, 4)
    write_rows(tmp_path / "rows.jsonl", [{k: v for k, v in row.items() if k != "reward"} for row in rows])
    code, out, err = curriculum("rows.jsonl", "--model", "model", "--items", 4)
    assert code == 0, err
    assert "observed" not in out
    assert out.startswith("4 tasks")
    code, _, err = curriculum("rows.jsonl", "--model", "model", "--items", 2)
    assert code == 2
    assert "a rank correlation needs at least 3" in err
