"""`treewise grow`: what it prints, and tree training that goes on from what it wrote."""

import json

import pytest

from tests.cli.helpers import save_tiny_model, write_rows
from treewise.cli.main import main

ROWS = [{"token_ids": [3, 4, 5 + k, 6, 7, 8 + k, 9], "group": f"g{k % 2}"} for k in range(4)]


@pytest.fixture
def treewise(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", ROWS)

    def call(*words):
        code = main([*map(str, words)])
        return code, *capsys.readouterr()

    return call


def test_training_goes_on_from_what_was_grown(treewise, tmp_path):
    code, out, err = treewise("grow", "model", "--output", "big", "--width", 2, "--layers", 4, "--verify")
    assert code == 0, err
    assert "logits       differ by " in out
    assert out.splitlines()[-1].endswith("--model big")
    facts = json.loads((tmp_path / "big" / "grow.json").read_text())
    assert facts["logit_difference"] < 1e-5
    assert (facts["width"], facts["num_layers"]) == (2, 4)
    train = ["--data", "rows.jsonl", "--use_cpu", "true", "--per_device_train_batch_size", 1, "--learning_rate", 1e-3]
    code, _, err = treewise("train", "--model", "big", "--output_dir", "out", *train)
    assert code == 0, err


def test_learned_operators_and_what_does_not_fit(treewise, tmp_path):
    words = ["grow", "model", "--output", "big", "--operator", "mango", "--width", 2, "--steps", 2]
    code, out, err = treewise(*words, "--data", "rows.jsonl", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert (facts["rank"], facts["steps"], len(facts["operator_losses"]), len(facts["data_sha256"])) == (1, 2, 2, 64)
    for more, message in (
        (["--output", "none", "--operator", "mango", "--width", 2], "give data"),
        (["--output", "none", "--width", 2, "--data", "rows.jsonl"], "--data is for mango"),
        (["--output", "none", "--layers", 1], "layers is 1, fewer than"),
        (["--output", "big", "--width", 2], "exists already"),
    ):
        code, _, err = treewise("grow", "model", *more)
        assert code == 2
        assert message in err
