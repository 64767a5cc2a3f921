"""A calibration end to end on a CPU, by a clock that ticks once a reading."""

from itertools import count

import numpy as np
import pytest
import torch

from treewise.bench.calibration import measure
from treewise.bench.calibration.measure import attention_size, calibrate, flat_size
from treewise.bench.calibration.rates import Calibration, Operation, as_json, load
from treewise.nn.attention.mask import TreeMask
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

CPU = torch.device("cpu")


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement takes one second, however many calls it makes."""
    ticks = count()
    monkeypatch.setattr(measure._Parts, "_clock", lambda _: float(next(ticks)))
    monkeypatch.setattr(measure, "CACHE_BYTES", 1)  # one call in a measurement


def calibrated(seconds: float = 1e9) -> Calibration:
    return calibrate(CPU, torch.float32, "qwen3-tiny", size="tiny", seconds=seconds)


@pytest.mark.usefixtures("ticking")
def test_every_part_is_measured_at_the_sizes_of_the_model(tmp_path) -> None:
    found = calibrated()
    assert found.launch_seconds == 0.01  # of a hundred
    assert 0 < found.host_seconds < 0.05
    sides = {(32, 32), (96, 32), (32, 96), (64, 32)}  # outputs and inputs of its layers and its head
    keys = {key for n, k in sides for key in (f"m,{n},{k}", f"m,{k},{n}", f"{n},{k},k")}
    assert set(found.products) == keys
    assert all(curve.sizes == (4.0, 16.0) and curve.seconds == (1.0, 1.0) for curve in found.products.values())
    assert set(found.moved) == {"pointwise", "strided", "reduced"}
    assert found.copies.sizes == (1024.0, 4096.0, 16_384.0)
    assert set(found.attention) == {
        f"{kind}{way}" for kind in ("attention", "flat_attention") for way in ("", "_backward")
    }
    assert set(found.attention["attention"]) == {5, 11}  # four thirds of runs of 4 and 8
    assert found.head_size == 16
    assert not found.is_queued
    (tmp_path / "card.json").write_text(as_json(found))
    assert load(tmp_path / "card.json") == found


@pytest.mark.usefixtures("ticking")
def test_what_a_forward_takes_is_not_counted_in_its_backward() -> None:
    backward = calibrated().attention["attention_backward"]
    assert all(each == 0.5 for curve in backward.values() for each in curve.seconds)  # both take one tick


@pytest.mark.usefixtures("ticking")
def test_what_time_did_not_suffice_for_is_no_domain() -> None:
    found = calibrated(seconds=0.0)
    assert [each.partition(":")[0] for each in found.about["left out for lack of time"]] == [
        *("moved", "copies", "products", "attention"),
    ]
    assert set(found.products) == {"m,32,32", "32,32,k"}  # of one layer
    assert found.of(Operation("pointwise", (2.0**14,))).source == "roofline"


def test_a_tree_is_counted_in_pairs_and_mean_segments() -> None:
    items = [Trajectory(np.array([1, 2, 3, *rest])) for rest in ([4, 5], [6], [7, 8, 9])]
    mask = TreeMask.from_layout(lay_out(plan(Forest.from_trajectories(items)), 0))
    pairs, run = attention_size("cascade", mask)
    assert pairs == (1 + 2 + 3) + (4 + 5) + 4 + (4 + 5 + 6)
    assert run == 9 / 3
    assert attention_size("flex", mask) == (2 * 128 * 128 / 2, 3.0)  # one block of pairs that are visible


def test_a_packed_row_is_counted_in_pairs_and_mean_sequences() -> None:
    assert flat_size(np.array([2, 3, 4])) == (3 + 6 + 10, 3.0)
