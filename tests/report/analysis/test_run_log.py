"""The log of a run, as transformers writes it."""

import io
import json
from itertools import chain
from pathlib import Path

import pytest
from rich.console import Console
from transformers import TrainerState

from tests.damage import NUM_CUTS, damages, retypings
from treewise.errors import ConfigError
from treewise.report import read_run, run_view
from treewise.report.html.build import run_charts

HISTORY = [
    {"loss": 3.0, "grad_norm": 1.5, "learning_rate": 1e-4, "epoch": 0.5, "step": 1, "share_ratio": 4.0}
    | {"tokens_per_second_flat": 900.0, "tokens_per_second_tree": 225.0, "tree_tokens": 1000.0},
    {"loss": 2.0, "grad_norm": 1.2, "learning_rate": 5e-5, "epoch": 1.0, "step": 2, "share_ratio": 5.0}
    | {"tokens_per_second_flat": 1000.0, "tokens_per_second_tree": 200.0, "tree_tokens": 1100.0},
    {"eval_loss": 2.2, "eval_runtime": 0.5, "epoch": 1.0, "step": 2},
    {"train_runtime": 12.5, "train_loss": 2.5, "total_flos": 1e9, "epoch": 1.0, "step": 2},
]


def write_run(folder: Path, history: list[dict], step: int = 2, flops: float = 0.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    TrainerState(log_history=history, global_step=step, max_steps=2, epoch=1.0, total_flos=flops).save_to_json(
        str(folder / "trainer_state.json")
    )
    return folder


def test_series_have_their_steps_units_and_charts(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", HISTORY))
    series = {each.key: each for each in run.series}
    assert series["loss"].steps == (1, 2)
    assert series["loss"].values == (3.0, 2.0)
    assert series["eval_loss"].chart == "loss"
    assert series["tokens_per_second_tree"].unit == "tokens per second"
    assert "eval_runtime" not in series
    assert run.is_finished
    assert run.summary["train_runtime"] == 12.5
    assert "efficiency" in run.absent
    assert [chart.title for chart in run_charts(run)][:3] == ["Loss", "Speed", "Share ratio"]


def test_a_run_that_still_trains_is_read_from_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        write_run(tmp_path / "run" / f"checkpoint-{step}", HISTORY[:2], step)
    run = read_run(tmp_path / "run")
    assert run.log.endswith("checkpoint-10/trainer_state.json")
    write_run(tmp_path / "young" / "checkpoint-1", HISTORY[:1], 1)
    assert not read_run(tmp_path / "young").is_finished


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [{"loss": float("nan"), "step": 1}, {"loss": 1.0, "step": 2}]))
    assert run.num_not_finite == 1
    assert run.series[0].values == (1.0,)


def test_unknown_keys_are_drawn_with_the_unit_of_their_name(tmp_path: Path) -> None:
    history = [{"peak_memory_bytes": 2.0, "my_metric": 3.0, "label": "text", "step": 1}]
    run = read_run(write_run(tmp_path / "run", history))
    assert {(each.key, each.chart, each.unit) for each in run.series} == {
        ("peak_memory_bytes", "memory", "bytes"),
        ("my_metric", "my metric", ""),
    }


def test_a_step_that_is_logged_again_replaces_itself(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [{"loss": 9.0, "step": 1}, {"loss": 1.0, "step": 1}]))
    assert run.series[0].values == (1.0,)


@pytest.mark.parametrize("content", [None, "not json", json.dumps([]), json.dumps({"global_step": 1})])
def test_what_is_no_run_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(ConfigError, match="trainer_state"):
        read_run(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_run(tmp_path / "none")


def test_arithmetic_speed_follows_from_the_totals(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", HISTORY, flops=2100 * 5e9))
    (found,) = [each for each in run.series if each.key == "arithmetic"]
    assert found.values == pytest.approx((225 * 5e-3, 200 * 5e-3))


def test_memory_is_drawn_in_gib(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [{"loss": 1.0, "memory_bytes": 3 * 2**30, "step": 1}]))
    assert "memory" not in run.absent
    assert [(each.unit, each.values) for each in run.series if each.chart == "memory"] == [("GiB", (3.0,))]


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    """Digits of a log that flip are not found: it is transformers' own file, without a checksum."""
    folder = write_run(tmp_path / "run", HISTORY)
    state = folder / "trainer_state.json"
    keys = {each.key for each in read_run(folder).series}
    errors = []
    for _ in chain(damages(state, num_flips=100), retypings(state)):
        try:
            read_run(folder)
        except ConfigError as error:
            errors.append(str(error))
    assert len(errors) > NUM_CUTS
    assert all(line.startswith((f"{state}: damaged (", f"{folder}: no trainer_state.json")) for line in errors)
    assert {each.key for each in read_run(folder).series} == keys


def test_settings_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", HISTORY)
    assert read_run(folder).config is None
    (folder / "resolved_config.yaml").write_bytes(b"model: \xff")
    assert read_run(folder).config.startswith(f"# {folder}/resolved_config.yaml: damaged ('utf-8' codec can't decode")


@pytest.mark.parametrize("columns", [120, 80, 60, 40])
def test_a_narrow_terminal_cuts_no_name(tmp_path: Path, columns: int) -> None:
    run = read_run(write_run(tmp_path / "run", HISTORY))
    console = Console(width=columns, file=io.StringIO())
    console.print(run_view(run))
    out = console.file.getvalue()
    assert max(map(len, out.splitlines())) <= columns
    for name in ("logged", "training, nats", "share ratio", "gradient norm", "learning rate", "first", "0.0001"):
        assert name in out, name
    assert ("lowest" in out) == (columns >= 80)
