"""How much of a workload a limit has room for: by FLOPs that are added up by hand, and a rate of ours."""

import math

import numpy as np
import pytest
import torch

from treewise.bench import Settings, make, measure_workload, random_model, run
from treewise.bench.contestants import twin
from treewise.bench.fitting import LEAST_ROUNDS, ROOM, fitted, flops_per_second, round_flops
from treewise.bench.workloads import Workload
from treewise.nn.model_flops import flop_model
from treewise.tree.forest import Forest

pytestmark = pytest.mark.xdist_group("bench/test_fitting")
ONE = Settings(["flat", "merged"], max_tokens=[5], repetitions=1)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return random_model("qwen3-tiny", torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def workload() -> Workload:
    made = make("search", "tiny", 64)
    return Workload("mine", made.trajectories, may_be_cut=True)


def test_a_round_is_a_step_of_each_contestant(model: torch.nn.Module, workload: Workload) -> None:
    flops, forest = flop_model(model), Forest.from_trajectories(workload.trajectories)
    flat, leaf, tree = flops.flat(forest), flops.leaf(forest), flops.tree(forest)
    assert leaf < flat
    assert round_flops(workload.trajectories, flops, ONE) == pytest.approx(flat + leaf + 2 * tree)
    twice = Settings(["flat"], with_checkpointing=True)
    assert round_flops(workload.trajectories, flops, twice, 0) == pytest.approx((flat + tree) * 7 / 3)


def test_as_many_trajectories_are_taken_as_there_are_seconds_for(model: torch.nn.Module, workload: Workload) -> None:
    flops = flop_model(model)
    needed = LEAST_ROUNDS * round_flops(workload.trajectories, flops, ONE) / ROOM  # seconds, at a FLOP each
    assert fitted(workload, flops, 1.0, ONE, needed) == (workload, True)
    assert fitted(workload, flops, None, ONE, 1.0) == (workload, False)  # nothing is known
    half, fits = fitted(workload, flops, 1.0, ONE, needed / 2)
    assert fits
    assert LEAST_ROUNDS * round_flops(half.trajectories, flops, ONE) <= ROOM * needed / 2
    count, every = len(half.trajectories), list(workload.trajectories)
    assert 2 < count < len(every)
    assert (half.trajectories[0], half.trajectories[-1]) == (every[0], every[-1])
    places = [next(index for index, each in enumerate(every) if each is item) for item in half.trajectories]
    assert max(np.diff(places)) - min(np.diff(places)) <= 1  # evenly spaced
    assert count + half.num_left_out == len(workload.trajectories)
    least, fits = fitted(workload, flops, 1.0, ONE, 1e-9)
    assert (len(least.trajectories), fits) == (2, False)
    assert len(fitted(workload, flops, 1.0, ONE, 1e-9, least=4)[0].trajectories) == 4


def test_a_rate_is_measured_and_leaves_no_gradient(model: torch.nn.Module, workload: Workload) -> None:
    own = twin(model)
    rate = flops_per_second(own, workload)
    assert rate is not None
    assert 0 < rate < math.inf
    assert not any(each.grad is not None and each.grad.any() for each in own.parameters())


def test_a_limit_takes_less_of_the_data_and_leaves_nobody_out(
    model: torch.nn.Module, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate by which a third of the workload fits into ten seconds. Who takes longer is measured all the same."""
    flops, lines, rows = flop_model(model), list[str](), list[dict]()
    rate = LEAST_ROUNDS * round_flops(workload.trajectories, flops, ONE) / ROOM / 30
    monkeypatch.setattr("treewise.bench.measure.flops_per_second", lambda *_: rate)
    monkeypatch.setattr("treewise.bench.measure.perf_counter", lambda: 0.0)
    long = Workload("long", [*workload.trajectories, *workload.trajectories], may_be_cut=True)
    monkeypatch.setattr("treewise.bench.pace.Pace.elapsed", property(lambda _: 1e9))  # all are late
    settings = Settings(["flat", "merged"], max_tokens=[5], repetitions=3, max_seconds=20)
    run(lambda: model, "tiny", lambda _: [long, workload], rows.append, settings, lines.append)
    assert [row["workload"] for row in rows] == ["mine", "long"]  # the shortest first
    assert all("seconds" in each for row in rows for each in row["contestants"].values())
    assert all({"flat", "merged", "tree", "tree@5"} <= set(row["contestants"]) for row in rows)
    (row, _) = rows
    assert 0 < row["num_left_out"] < len(workload.trajectories) - 2
    assert f"{row['num_trajectories']} of its {len(workload.trajectories)} trajectories, as all would take" in lines[0]
    assert "; flat, merged, tree, tree@5 in turns, a step to warm up and 3 steps each where time allows" in lines[0]
    assert lines[0].endswith(", at most 0:10")


def test_a_workload_that_no_second_is_left_for_says_so(
    model: torch.nn.Module, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 25.0])
    monkeypatch.setattr("treewise.bench.measure.perf_counter", lambda: next(clock))
    rows: list[dict] = []
    settings = Settings(["flat"], max_tokens=[5], repetitions=1, max_seconds=20)
    run(lambda: model, "tiny", lambda _: [workload, workload], rows.append, settings)
    assert "seconds" in rows[0]["contestants"]["tree"]
    assert rows[1]["skipped"] == "not measured: what came before took all of --max_seconds 20"


def test_without_leaving_out_a_contestant_has_at_least_one_step(model: torch.nn.Module, workload: Workload) -> None:
    settings = Settings(["flat"], max_tokens=[5], repetitions=5, max_seconds=1e-9, leaves_out=False)
    row = measure_workload(twin(model), workload, settings)
    assert all("seconds" in each for each in row["contestants"].values())
