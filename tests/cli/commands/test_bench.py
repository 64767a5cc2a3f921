"""`treewise bench` as it is called."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.helpers import save_tiny_model, write_rows
from treewise.bench.results import row_view
from treewise.cli.main import main
from treewise.testing import tiny_model

pytest.importorskip("trl")

TINY = ["bench", "--model", "qwen3-tiny", "--size", "tiny", "--device", "cpu", "--repetitions", "1"]


@pytest.mark.parametrize(("name", "says"), [("rows.jsonl", "name one that ends in .json"), ("log.json", "no results")])
def test_what_results_cannot_be_added_to_is_an_error_before_a_step(
    name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treewise.bench.measure_workload", None)
    (tmp_path / name).write_text("[]")
    assert main([*TINY, "--json", str(tmp_path / name)]) == 2
    assert says in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "[]"


@pytest.mark.exhaustive
def test_a_run_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = [*TINY, "--workload", "grpo", "--against", "flat", "--max-tokens", "30"]
    assert main([*words, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "qwen3-tiny, grpo, float32 on cpu: 241 flat and 73 tree tokens" in printed
    assert "tree@30" in printed
    found = json.loads(out.read_text())
    assert found["benchmark"] == "treewise bench"
    assert found["rows"][0]["contestants"]["tree"]["gradient_error"] < 2e-6


def test_own_trees_on_an_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model(tmp_path / "model")
    prompt = list(range(1, 20))
    rows = [{"group": group, "token_ids": [*prompt, 20 + end, 30]} for group in ("a", "b") for end in range(4)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    words = ["bench", str(data), "--model", str(model), "--device", "cpu", "--repetitions", "1", "--against", "merged"]
    out = tmp_path / "out.json"
    assert main([*words, "--trees", "b", "--max-flat-tokens", "70", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["workload"], row["num_trajectories"], row["tree_tokens"]) == ("b", 3, 25)
    assert main([*words, "--trees", "c"]) == 2
    assert "no tree 'c'" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [200, 80, 60, 40])
def test_a_narrow_terminal_cuts_no_column(columns: int) -> None:
    results = Path(__file__).parents[3] / "benchmarks" / "results" / "real-cpu-x86_64-2-threads.json"
    row = json.loads(results.read_text())["rows"][0]
    console = Console(width=columns, file=io.StringIO())
    console.print(row_view(row))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    tables = "\n".join(lines)
    assert "…" not in tables
    for name in ("seconds", "over flat", "efficiency", "of tree (bound)", "peak MiB", "key rows/token", "host s"):
        assert tables.count(name) == 1, name
    for contestant in ("flat", "trl", "tree", "tree@724"):
        seconds = row["contestants"][contestant]["seconds"]
        assert sum(f"{seconds['median']:.3f} ({seconds['min']:.3f}" in line for line in lines) == 1


def test_dropout_is_set_to_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("gpt2", num_hidden_layers=1, resid_pdrop=0.1, bos_token_id=None, eos_token_id=None)
    model.save_pretrained(tmp_path / "model")
    words = ["bench", "--model", str(tmp_path / "model"), *TINY[3:], "--workload", "grpo", "--against", "flat"]
    out = tmp_path / "out.json"
    assert main([*words, "--max-tokens", "30", "--json", str(out)]) == 0
    captured = capsys.readouterr()
    assert "dropout is set to 0 for this measurement, in 2 places" in captured.err
    (row,) = json.loads(out.read_text())["rows"]
    assert list(row["contestants"]) == ["flat", "tree", "tree@30"]
    for found in row["contestants"].values():
        assert found["gradient_error"] < 5e-6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repetitions", "0"], "--repetitions is 0"),
        (["--trees", "a"], "no DATA is named"),
        (["--max-tokens", "0"], "--max_tokens is 0; it must be at least 1"),
        (["--row-tokens", "-1"], "--row_tokens is -1"),
        (["--device", "abacus"], "--device is 'abacus'"),
        (["--device", "meta"], "runs on cpu and cuda"),
    ],
)
def test_settings_without_sense_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_models_without_room_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("treewise.nn.platform.memory.free_bytes", lambda _: 1000)
    assert main(TINY) == 2
    captured = capsys.readouterr()
    assert "qwen3-tiny: weights and gradients take" in captured.out
    assert "nothing was measured" in captured.err


def test_a_gpu_that_is_not_there_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) == 2
    assert "finds no GPU here" in capsys.readouterr().err
