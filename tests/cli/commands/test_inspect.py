"""`treewise inspect`: the facts are those of the forests, and what is wrong with the data is found."""

import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.cli.helpers import call, save_tiny_model, write_rows
from treewise.cli.main import main
from treewise.errors import DataError

TRUNK = list(range(1, 21))
ROWS = [
    {"token_ids": [*TRUNK, 30, 31], "group": "a", "reward": 1.0},
    {"token_ids": [*TRUNK, 40], "group": "a", "reward": 1.0},
    {"token_ids": TRUNK, "group": "a", "reward": 1.0},
    {"token_ids": TRUNK, "group": "a", "reward": 1.0},
    {"token_ids": [50, *TRUNK], "group": "b", "reward": 0.0},
    {"token_ids": [51, *TRUNK], "group": "b", "reward": 1.0},
    {"token_ids": [60, 61, 62], "group": "c"},
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def inspect_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert call("inspect", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_sizes_are_those_of_the_trees(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspect_json(capsys, rows)
    trees = {tree["name"]: tree for tree in facts["trees"]}
    assert facts["num_trees"] == 3
    assert facts["num_records"] == 7
    assert trees["a"]["num_flat_tokens"] == 22 + 21 + 20 + 20
    assert trees["a"]["num_leaf_tokens"] == 22 + 21
    assert trees["a"]["num_tree_tokens"] == 23
    assert trees["a"]["num_leaves"] == 2
    assert trees["a"]["num_forks"] == 1
    assert trees["a"]["max_depth"] == 22
    assert facts["total"]["num_flat_tokens"] == 83 + 42 + 3
    assert facts["total"]["share_ratio"] == pytest.approx((83 + 42 + 3) / (23 + 42 + 3))
    assert facts["best_trees"][0] == "a"
    assert facts["total"]["flop_bound"] is None


def test_the_table_shows_the_same_facts(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("inspect", rows, "--model", save_tiny_model(tmp_path / "model")) == 0
    out = capsys.readouterr().out
    for text in ("share ratio", "leaf ratio", "pair ratio", "FLOP bound", "best trees", "rewards all equal", "1.88"):
        assert text in out


def test_a_long_name_does_not_flood_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"token_ids": [*TRUNK, 30 + i], "group": "b" + "x" * 9000 + "e", "reward": 1.0} for i in range(2)]
    assert call("inspect", write_rows(tmp_path / "rows.jsonl", rows)) == 0
    out = capsys.readouterr().out
    assert "rewards all equal" in out
    assert 300 < out.count("x") < 500


@pytest.mark.parametrize("columns", [80, 60])
def test_names_and_numbers_of_the_best_trees_stand_whole_on_their_lines(
    columns: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    groups = ["crosswords-12", "crosswords-13", "games/of/twenty/four/puzzle-14/\u8c9d\u6bbb"]
    rows = [{"token_ids": [*range(90), i % 7], "group": group} for group in groups for i in range(1200)]
    assert call("inspect", write_rows(tmp_path / "rows.jsonl", rows), "--model", save_tiny_model(tmp_path / "m")) == 0
    out = capsys.readouterr().out
    assert max(map(cell_len, out.splitlines())) <= columns
    table = out[out.index("best trees") : out.index("worth a look")]
    for end in ("words-12", "words-13", "/\u8c9d\u6bbb"):
        assert sum(end in line for line in table.splitlines()) == 1, table
    for number in ("1,200", "109,200", "97", "1125.77", "6.57"):  # 1,200 rows of 91 tokens; 7 leaves
        assert len(re.findall(rf"(?<![\d.,-]){number}(?![\d.])", table)) == len(groups), table


def test_a_terminal_that_does_not_say_its_width_gets_all_of_it(
    rows: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["inspect", str(rows)]) == 0
    assert "share ratio" in capsys.readouterr().out


def test_token_ids_beyond_the_model_are_refused_as_in_training(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"token_ids": [1, 2]}, {"token_ids": [1, 2, 97], "group": "b"}])
    model = save_tiny_model(tmp_path / "model")
    assert call("inspect", data) == 0
    said = []
    for words in (("inspect",), ("inspect", "--html", tmp_path / "a.html"), ("plan",), ("verify",)):
        with pytest.raises(DataError) as error:
            call(words[0], data, "--model", model, *words[1:])
        said.append(str(error.value))
    assert "rows.jsonl:2: token id 97 at position 2 is outside the vocabulary of 97 tokens" in said[0]
    assert set(said) == {said[0]}
    assert not (tmp_path / "a.html").exists()


def test_dropped_records_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the quarantine is written
    rows = write_rows(tmp_path / "rows.jsonl", [*ROWS, {"token_ids": []}])
    facts = inspect_json(capsys, rows, "--on_bad_record", "quarantine")
    dropped = next(each for each in facts["findings"] if each["kind"] == "dropped record")
    assert dropped["count"] == 1
    assert "rows.jsonl:8" in dropped["examples"][0]


def test_why_there_are_more_trajectories_than_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record of several rows has no turn."""
    seqs = [{"ids": [*TRUNK, 30 + i], "loss": [[20, 21]]} for i in range(3)]
    assert call("inspect", write_rows(tmp_path / "rows.jsonl", [{"seqs": seqs, "group": "a"}])) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 trajectories of 1 record: each row, trained turn, logged call, completion or leaf is one" in said
