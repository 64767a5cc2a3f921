"""What operations take by a calibration: within its domain, beyond it, and in a step's queue."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from treewise.bench.calibration.rates import (
    ATTENTION,
    MEASURED,
    ROOFLINE,
    Calibration,
    Curve,
    Operation,
    Roofline,
    as_json,
    best_of,
    load,
    of_data_sheet,
    product_key,
    work,
)
from treewise.errors import ConfigError

ROOF = Roofline(1e3, 1e2, 10.0, dict.fromkeys(ATTENTION, 5e2))
TABLE = Calibration(
    ROOF,
    products={
        product_key((0, 8, 4), 0): Curve((2.0, 8.0), (1.0, 4.0)),
        product_key((8, 4, 0), 2): Curve((4.0,), (3.0,)),
    },
    moved={"pointwise": Curve((16.0, 64.0), (0.5, 0.5))},
    attention={"attention": {4: Curve((10.0, 1000.0), (1.0, 100.0)), 16: Curve((10.0, 1000.0), (4.0, 400.0))}},
    copies=Curve((8.0, 16.0), (1.0, 2.0)),
    launch_seconds=0.25,
    host_seconds=2.0,
    head_size=16,
)


@pytest.mark.parametrize(
    ("operation", "seconds"),
    [
        (Operation("product", (1, 2, 8, 4)), 1.0),
        (Operation("product", (1, 4, 8, 4)), 2.0),  # halfway between the logarithms
        (Operation("product", (1, 8, 4, 4)), 3.0),  # by the side that is summed over
        (Operation("pointwise", (32,)), 0.5),
        (Operation("attention", (100, 4, 16)), 10.0),
        (Operation("attention", (100, 8, 16)), 20.0),  # between the runs
        (Operation("copy", (16,)), 2.0),
    ],
)
def test_within_the_domain(operation: Operation, seconds: float) -> None:
    found = TABLE.of(operation)
    assert (found.seconds, found.source) == (pytest.approx(seconds), MEASURED)


@pytest.mark.parametrize(
    ("operation", "seconds"),
    [
        (Operation("product", (1, 16, 8, 4)), 16 * 8 * 4 * 2 / 1e3),  # more rows, bound by FLOPs or bytes
        (Operation("product", (3, 2, 8, 4)), 3 * (8 + 32 + 16) * 2 / 1e2),  # several at once
        (Operation("product", (1, 2, 9, 4)), (8 + 36 + 18) * 2 / 1e2),  # another model
        (Operation("pointwise", (65,)), 0.65),
        (Operation("pointwise", (15,)), 0.15),
        (Operation("strided", (100,)), 1.0),
        (Operation("attention", (100, 3, 16)), 4 * 100 * 16 / 5e2),
        (Operation("attention", (100, 17, 16)), 4 * 100 * 16 / 5e2),
        (Operation("attention", (1001, 4, 16)), 4 * 1001 * 16 / 5e2),
        (Operation("attention", (100, 4, 32)), 4 * 100 * 32 / 5e2),  # heads of another size
        (Operation("attention_backward", (100, 4, 16)), 2.5 * 4 * 100 * 16 / 5e2),
        (Operation("copy", (17,)), 1.7),
    ],
)
def test_beyond_it_the_roofline_and_a_launch(operation: Operation, seconds: float) -> None:
    roof = max(seconds, 0.0)
    if operation.kind == "product":
        times, m, n, k = operation.size
        roof = max(work(operation) / 1e3, times * (m * k + k * n + m * n) * 2 / 1e2)
        assert roof >= seconds - 1e-12
    found = TABLE.of(operation)
    assert (found.seconds, found.source) == (pytest.approx(roof + 0.25), ROOFLINE)


def test_a_device_runs_behind_its_host() -> None:
    fast, slow = Operation("pointwise", (16,)), Operation("product", (1, 8, 8, 4))
    # Launched at 2, 4 and 6; the second runs from 4 to 8, so the third waits for it.
    found = TABLE.step([fast, slow, fast])
    assert (found.seconds, found.host_seconds, found.num_operations) == (8.5, 6.0, 3)
    assert found.by_kind == {"pointwise": 1.0, "product": 4.0}
    assert found.measured_part == 1.0
    assert TABLE.step([fast, fast, fast]).seconds == 6.5  # the host is what bounds it


def test_a_cpu_is_its_own_host() -> None:
    operations = [Operation("pointwise", (16,)), Operation("product", (1, 8, 8, 4))]
    assert replace(TABLE, is_queued=False).step(operations).seconds == 0.5 + 4.0 + 2 * (2.0 - 0.25)


def test_of_a_step_the_part_within_the_domain() -> None:
    inside, outside = Operation("product", (1, 2, 8, 4)), Operation("pointwise", (275,))
    assert TABLE.step([inside, outside]).measured_part == pytest.approx(1.0 / (1.0 + 2.75 + 0.25))


def test_the_roofline_is_the_best_that_was_measured() -> None:
    products = {"m,8,4": Curve((2.0, 8.0), (1.0, 2.0)), "16,8,k": Curve((2.0,), (1.0,))}
    moved = {"pointwise": Curve((10.0, 20.0), (1.0, 4.0)), "reduced": Curve((10.0,), (5.0,))}
    attention = {"attention": {4: Curve((10.0,), (2.0,)), 8: Curve((10.0,), (1.0,))}}
    found = best_of(products, moved, attention, Curve((10.0, 30.0), (1.0, 2.0)), head_size=2)
    assert found == Roofline(16 * 8 * 2 * 2.0, 5.0, 15.0, {"attention": 80.0})


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(as_json(replace(TABLE, about={"card": "a card"})))
    assert load(tmp_path / "card.json") == replace(TABLE, about={"card": "a card"})


@pytest.mark.parametrize("damage", ["", "[]", json.dumps({"calibration": 2}), as_json(TABLE).replace("launch_", "l_")])
def test_a_file_of_another_form_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / "card.json").write_text(damage)
    with pytest.raises(ConfigError, match=r"card\.json: damaged .*doctor --calibrate"):
        load(tmp_path / "card.json")


def test_a_data_sheet_measures_nothing() -> None:
    found = of_data_sheet("H100").step([Operation("product", (1, 4096, 4096, 4096)), Operation("reduced", (335,))])
    assert found.seconds == pytest.approx(2 * 4096**3 / 989e12 + 1e-10)
    assert found.measured_part == 0.0
