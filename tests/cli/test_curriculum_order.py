"""`treewise train --curriculum`: refused where useless, each tree once an epoch, the same steps after a resume."""

import json

import pytest

from tests.cli.commands.test_rl import make_rows
from tests.cli.helpers import save_tiny_model, write_rows
from treewise.cli.main import main

FAST = ["--optim", "sgd", "--learning_rate", 0.5, "--per_device_train_batch_size", 1, "--num_train_epochs", 2]


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", make_rows(num_groups=4))

    def call(command, *words, output="out"):
        given = ["--model", "model", "--data", "rows.jsonl", "--output_dir", output, "--use_cpu", "true", *FAST, *words]
        code = main([command, *map(str, given)])
        return code, *capsys.readouterr()

    return call


def losses(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def test_a_resumed_run_orders_as_the_undisturbed_one(train, tmp_path):
    forced = ["--curriculum", "gain", "--curriculum_settings.force", "true"]
    given = [*forced, "--save_strategy", "steps", "--save_steps", 3]
    code, out, err = train("train", *given, output="whole")
    assert code == 0, err
    assert "4 tasks, 12 rollouts" in out
    assert (tmp_path / "whole" / "curriculum" / "check.json").is_file()
    whole = losses(tmp_path / "whole")
    assert len(whole) == 8
    code, _, err = train("train", *given, "--resume", tmp_path / "whole" / "checkpoint-3", output="again")
    assert code == 0, err
    assert losses(tmp_path / "again")[-5:] == whole[-5:]
    code, _, err = train("train", *given[4:], "--resume", tmp_path / "whole" / "checkpoint-3", output="other")
    assert code == 2
    assert "was made with curriculum=" in err


def test_useless_and_unfit_curricula_are_refused(train, tmp_path):
    code, out, err = train("train", "--curriculum", "gain")
    assert (code == 2) == ("useless here" in out.split("intra")[0])
    assert code == 0 or "--curriculum_settings.force true" in err
    code, _, err = train("train", "--curriculum", "dynamic", output="other")
    assert code == 2
    assert "'dynamic' chooses what to sample next" in err
    assert not (tmp_path / "other").exists()


def test_recorded_rollouts_are_ordered_too(train, tmp_path):
    flags = ["--objective", "grpo", "--curriculum", "learnability"]
    code, _, err = train("rl", *flags)
    assert code == 0, err
    assert len(losses(tmp_path / "out")) == 8
