"""Measuring in turns, and what is made of it: rows, files, the check against a baseline."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from tests.damage import NUM_CUTS, NUM_FLIPS, OTHERS, damages
from treewise.bench import Settings, load, make, measure_workload, random_model, record, run, save
from treewise.bench.contestants import twin
from treewise.bench.flat import FlatRows
from treewise.bench.measure import Measured, check_losses, measure, peak_bytes, speed_ups
from treewise.bench.results import efficiency
from treewise.errors import ConfigError, OutOfMemoryError, VerificationError
from treewise.testing.oracle import LEAST_ROUNDING, TIMES_FLAT

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("bench/test_results")]

CPU = torch.device("cpu")

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return random_model("qwen3-tiny", torch.float32, CPU)


@pytest.fixture(scope="module")
def row(model: torch.nn.Module) -> dict:
    settings = Settings(repetitions=2, reference="float64")
    found = measure_workload(twin(model), make("search", "tiny", 64), settings)
    return {"model": "qwen3-tiny", **found}


def test_a_row_holds_what_is_promised(row: dict) -> None:
    assert set(row["contestants"]) >= {"flat", "merged", "trl", "tree", "tree@11"}
    assert row["reference"] == "flat training of a float64 copy"
    limit = TIMES_FLAT * max(LEAST_ROUNDING, row["contestants"]["flat"]["gradient_error"])
    for name, found in row["contestants"].items():
        assert 0 < found["gradient_error"] < limit, name
        assert found["seconds"]["min"] <= found["seconds"]["median"] <= found["seconds"]["max"]
        assert found["key_rows_per_token"] >= 1
    assert row["contestants"]["flat"]["computed_tokens"] == row["flat_tokens"]
    assert row["contestants"]["tree"]["computed_tokens"] == row["tree_tokens"]
    assert row["contestants"]["tree@11"]["recomputed_tokens"] > 0
    assert row["contestants"]["tree"]["bound_of_tree"] is None
    assert row["contestants"]["tree@11"]["bound_of_tree"] < 1
    assert set(row["speed_up"]) == {"flat", "merged", "trl"}
    seconds = {name: found["seconds"]["median"] for name, found in row["contestants"].items()}
    assert row["speed_up"]["merged"]["tree"] == pytest.approx(seconds["merged"] / seconds["tree"])
    assert row["flop_bound"] > row["leaf_flop_bound"] > 1
    json.dumps(row)


def test_contestants_take_turns(model: torch.nn.Module) -> None:
    turns: list[str] = []
    contestants = {name: lambda name=name: turns.append(name) or 1.0 for name in ("one", "two")}
    found = measure(model, contestants, repetitions=2)
    assert turns == ["one", "two"] * 3
    assert all(len(each.seconds) == 2 for each in found.values())
    assert len(measure(model, contestants, repetitions=5, max_seconds=0)["one"].seconds) == 1


def test_the_peak_of_a_gpu_is_what_the_allocator_reserved_since_it_returned_its_cache(monkeypatch) -> None:
    device, done = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: done.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 300)
    assert (peak_bytes(device, reset=True), peak_bytes(device)) == (100, 300)
    assert done == ["emptied", "reset"]


def test_who_runs_out_of_memory_is_left_out(model: torch.nn.Module) -> None:
    calls = itertools.count()

    def fails_later() -> float:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return 1.0

    def fails() -> float:
        raise MemoryError("no room")

    found = measure(model, {"a": fails, "b": lambda: 1.0, "c": fails_later}, repetitions=3)
    assert found["a"].skipped == "out of memory: no room"
    assert found["b"].skipped is None
    assert len(found["b"].seconds) == 3
    assert "Tried to allocate" in str(found["c"].skipped)
    assert set(speed_ups(found)) == {"b"}


def test_who_raises_is_left_out_and_raised_once_all_others_are_measured(model: torch.nn.Module) -> None:
    steps, ran = {"a": lambda: float("a mistake"), "b": lambda: float(bool(ran.append("b") or 1))}, []
    with pytest.raises(ValueError, match="a mistake"):
        measure(model, steps, repetitions=2)
    assert ran == ["b"] * 3
    errors: list[Exception] = []
    found = measure(model, steps, repetitions=2, on_error=errors.append)
    assert found["a"].skipped == "failed: ValueError: could not convert string to float: 'a mistake'"
    assert (len(found["b"].seconds), [type(each) for each in errors]) == (2, [ValueError])


def test_rows_of_a_run_are_there_where_a_contestant_raises(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both workloads, with the others in them."""

    def broken(*_: object) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(FlatRows, "step", broken)
    rows: list[dict] = []
    workloads = [make(name, "tiny", 64) for name in ("grpo", "tau2")]
    settings = Settings(["flat"], max_tokens=[30], repetitions=1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(lambda: model, "tiny", lambda _: workloads, rows.append, settings)
    assert [row["workload"] for row in rows] == ["tau2", "grpo"]  # the shorter one first
    for row in rows:
        why = "failed: RuntimeError: CUDA error: an illegal memory access was encountered"
        assert row["contestants"]["flat"] == {"skipped": why}
        assert row["contestants"]["tree"]["seconds"]["median"] > 0


def test_different_losses_end_the_comparison() -> None:
    found = {"flat": Measured(loss=2.0), "gone": Measured(skipped="no room"), "tree": Measured(loss=2.05)}
    with pytest.raises(VerificationError, match=r"tree has loss 2.050000, flat 2.000000"):
        check_losses(found, torch.float32)
    check_losses(found, torch.bfloat16)
    found["tree"].loss = math.nan
    with pytest.raises(VerificationError, match="nan"):
        check_losses(found, torch.bfloat16)


def test_rows_of_others_with_another_loss_are_left_out() -> None:
    found = {"flat": Measured(loss=2.0), "trl": Measured(loss=2.1), "tree": Measured(loss=2.0)}
    check_losses(found, torch.float32)
    assert found["trl"].skipped == "does not compute this model: loss 2.100000, flat 2.000000"
    assert found["tree"].skipped is None


def test_a_model_without_room_is_a_row_that_says_so() -> None:
    def too_large() -> torch.nn.Module:
        raise OutOfMemoryError("takes 55 GiB")

    rows: list[dict] = []
    run(too_large, "qwen3-14b", lambda _: [], rows.append, Settings())
    assert rows == [{"model": "qwen3-14b", "skipped": "takes 55 GiB"}]


def test_an_unknown_reference_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(ConfigError, match="'exact' is unknown"):
        measure_workload(twin(model), make("grpo", "tiny", 64), Settings(reference="exact"))


def test_damaged_results_are_named(tmp_path: Path) -> None:
    content = record([{"model": "m", "workload": "w", "flop_bound": 1.5}], ["treewise", "bench"])
    path = save(tmp_path, content, "trial")
    num_named = 0
    for _ in damages(path):
        try:
            same = load(path)["rows"] == content["rows"]  # where the checksum's own name was hit
        except ConfigError as error:
            same = str(error).startswith(f"{path}: ") and str(error).endswith("; no results of treewise bench.")
        num_named += same
    assert num_named == NUM_FLIPS + NUM_CUTS + len(OTHERS) + 1
    path.write_text(json.dumps(content))  # of earlier versions
    assert load(path)["rows"] == content["rows"]


def test_files_collect_rows(row: dict, tmp_path: Path) -> None:
    path = save(tmp_path, record([row], ["treewise", "bench"]), "trial")
    assert path.name.startswith("trial-")
    other = {**row, "workload": "another"}
    save(path, record([other], ["treewise", "bench"]))
    save(path, record([{**row, "flop_bound": 7.0}], ["treewise", "bench"]))
    rows = load(tmp_path, "trial")["rows"]
    assert [each["workload"] for each in rows] == ["another", "search"]
    assert rows[1]["flop_bound"] == 7.0
    (tmp_path / "other.json").write_text('{"benchmark": "step"}')
    for name in ("other.json", "none.json"):
        with pytest.raises(ConfigError, match="no results of treewise bench"):
            load(tmp_path / name)


@pytest.mark.parametrize(
    ("kernel", "timed", "capability", "dtype", "is_quoted"),
    [
        *(("flash_attn 2", (), [9, 0], "bfloat16", False), ("torch varlen", (), [10, 0], "float16", False)),
        *(("flash_attn 3", (), [9, 0], "bfloat16", True), ("flash_attn 2", (), [8, 0], "bfloat16", True)),
        *(("sdpa", (), [9, 0], "float32", True), ("sdpa", (), None, "float32", True)),
        ("cudnn sdpa", ("torch varlen", "cudnn sdpa"), [9, 0], "bfloat16", True),
        ("torch varlen", ("torch varlen", "cudnn sdpa"), [9, 0], "bfloat16", True),  # it was the faster
        ("torch varlen", ("torch varlen", "flash_attn 2"), [9, 0], "bfloat16", False),
    ],
)
def test_no_efficiency_over_kernels_of_older_cards(
    kernel: str, timed: tuple[str, ...], capability: object, dtype: str, is_quoted: bool
) -> None:
    facts = {"varlen_kernel": kernel, "capability": capability, "dtype": dtype, "flop_bound": 4.0}
    facts["contestants"] = {"flat": {"kernel": {"name": kernel, "seconds": dict.fromkeys(timed, 1.0)}}}
    found = efficiency({**facts, "speed_up": {"flat": {"tree": 3.0}}}, "tree")
    assert found == (0.75 if is_quoted else None)
