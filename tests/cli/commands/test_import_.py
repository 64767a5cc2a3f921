"""`treewise import`: what it writes, what it says, and that it leaves nothing half-written."""

import json
from pathlib import Path

import pytest

from treewise.cli.main import main
from treewise.data import load_trees

SAMPLES = Path(__file__).parents[2] / "data" / "importers" / "samples"


def test_a_dump_becomes_rows_that_load(tmp_path, capsys):
    out = tmp_path / "new" / "rollouts.jsonl"
    assert main(["import", str(SAMPLES / "slime.jsonl"), "-o", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())  # lines are as wide as the terminal
    assert "slime" in said
    assert "2 in 1 group" in said
    assert "remove_sample is set" in said
    dataset = load_trees(out)
    assert [len(tree.trajectories) for tree in dataset] == [3]
    assert [path.name for path in out.parent.iterdir()] == ["rollouts.jsonl"]
    assert main(["import", str(SAMPLES / "slime.jsonl"), "-o", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_rows_go_to_standard_output_and_facts_to_json(tmp_path, capsys):
    assert main(["import", str(SAMPLES / "openai.jsonl"), "--from", "openai", "-o", "-"]) == 0
    out, err = capsys.readouterr()
    assert [len(json.loads(line)["calls"]) for line in out.splitlines()] == [3, 1]
    assert "2 rows of text alone" in err
    assert main(["import", str(SAMPLES / "trl.jsonl"), "-o", str(tmp_path / "a.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_rollouts"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["slime.jsonl", "-o", "rows.txt"], "rows.jsonl"),
        (["slime.jsonl", "-o", "a.jsonl", "--from", "art"], "those of 'slime'"),
        (["verl_generations.jsonl", "-o", "a.jsonl", "--strict"], "without token ids"),
        (["none.jsonl", "-o", "a.jsonl"], "no such file"),
    ],
)
def test_a_failed_import_leaves_nothing(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(SAMPLES / arguments[0]), *arguments[1:]]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
