"""Measuring in turns, and what is made of it: rows, files, the check against a baseline."""

import copy
import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from treewise.bench import Settings, check, load, make, measure_workload, random_model, record, run, save
from treewise.bench import measure as measuring
from treewise.bench.contestants import twin
from treewise.bench.measure import Measured, measure
from treewise.bench.suite import check_losses, speed_ups
from treewise.errors import ConfigError, OutOfMemoryError, VerificationError

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
    for name, found in row["contestants"].items():
        assert 0 < found["gradient_error"] < 2e-6, name
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


def test_a_wide_copy_that_does_not_fit_leaves_the_first_contestant_as_reference(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(rows: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    workload = make("grpo", "tiny", 64)
    with monkeypatch.context() as patch:
        patch.setattr("treewise.bench.suite.FlatRows.step", step)
        found = measure_workload(twin(model), workload, Settings(["trl"], repetitions=1, reference="float64"))
    assert found["reference"] == "the first contestant (a float64 copy ran out of memory)"
    assert found["contestants"]["tree"]["gradient_error"] < 2e-6


def test_workloads_after_one_that_disagrees_are_measured_too(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads = [make("grpo", "tiny", 64), make("ratio-6.5", "tiny", 64)]

    def refuse(found: dict[str, Measured], dtype: torch.dtype) -> None:
        if found["flat"].loss == first_loss:
            raise VerificationError("not the same work")

    settings = Settings(["flat"], repetitions=1)
    first_loss = measure_workload(twin(model), workloads[0], settings)["contestants"]["flat"]["loss"]
    monkeypatch.setattr("treewise.bench.suite.check_losses", refuse)
    told: list[dict] = []
    with pytest.raises(VerificationError, match="not the same work"):
        run(lambda: model, "tiny", lambda *_: workloads, told.append, settings)
    assert [(row["workload"], "skipped" in row) for row in told] == [("grpo", True), ("ratio-6.5", False)]


def test_contestants_take_turns(model: torch.nn.Module) -> None:
    turns: list[str] = []
    contestants = {name: lambda name=name: turns.append(name) or 1.0 for name in ("one", "two")}
    found = measure(model, contestants, repetitions=2)
    assert turns == ["one", "two"] * 3
    assert all(len(each.seconds) == 2 for each in found.values())
    assert len(measure(model, contestants, repetitions=5, max_seconds=0)["one"].seconds) == 1


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
    with pytest.raises(ValueError, match="a mistake"):
        measure(model, {"a": lambda: float("a mistake")}, repetitions=1)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_who_needs_more_than_is_free_is_left_out_and_the_limit_goes_again(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(measuring, "free_bytes", lambda device: 2**28)

    def takes(size: int) -> Callable[[], float]:
        return lambda: float(torch.ones(size // 4).sum())

    before = resource.getrlimit(resource.RLIMIT_DATA)
    found = measure(model, {"large": takes(2**30), "small": takes(2**26)}, repetitions=1)
    assert "can't allocate memory" in str(found["large"].skipped)
    assert found["small"].skipped is None
    assert found["small"].seconds
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_gradients_are_compared_with_the_first_that_ran(model: torch.nn.Module) -> None:
    weight = next(model.parameters())

    def step(factor: float) -> float:
        weight.grad.fill_(factor)
        return 1.0

    found = measure(model, {"one": lambda: step(1.0), "two": lambda: step(1.5)}, repetitions=1)
    assert found["one"].gradient_error == 0
    assert found["two"].gradient_error == pytest.approx(0.5)


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


def test_what_became_worse_is_named(row: dict) -> None:
    baseline = {"rows": [row]}
    worse, count = check({"rows": [row]}, baseline)
    assert worse == []
    assert count == 2  # tree and tree@11

    def times(factors: dict[str, float]) -> dict:
        changed = copy.deepcopy(row)
        for name, found in changed["contestants"].items():
            found["seconds"]["min"] *= factors.get(name, factors.get("others", 1.0))
        return {"rows": [changed]}

    slower = times({"tree": 1.25})
    assert check(slower, baseline)[0] == [
        "qwen3-tiny, search: tree has 0.80 of the baseline's speed beside flat, merged, trl"
    ]
    assert check(slower, baseline, min_speed=0.7)[0] == []
    assert check(times({"others": 3.0}), baseline)[0] == []  # a slower machine
    assert check(times({"tree": 3.0, "others": 3.0, "tree@11": 4.0}), baseline)[0][0].startswith(
        "qwen3-tiny, search: tree@11 has 0.75"
    )
    assert check(times({"trl": 1.2}), baseline)[0] == []  # another contestant that was disturbed

    wrong = copy.deepcopy(row)
    wrong["contestants"]["tree"]["gradient_error"] = 1e-3
    assert "gradient error of tree is 1.0e-03" in check({"rows": [wrong]}, baseline)[0][0]

    gone = copy.deepcopy(row)
    gone["contestants"]["tree"] = {"skipped": "out of memory"}
    assert check({"rows": [gone]}, baseline)[0] == ["qwen3-tiny, search: tree did not run"]
    assert check({"rows": [{**row, "workload": "another"}]}, baseline) == ([], 0)
