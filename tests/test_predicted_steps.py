"""Steps as they are recorded without a device, and the seconds that an H100 is predicted to take for them."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from treewise.bench.calibration.rates import work
from treewise.nn.attention import flex
from treewise.nn.flops import flat_head_rows, tree_head_rows
from treewise.nn.model_flops import flop_model
from treewise.tree.forest import Forest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def predict() -> Iterator[ModuleType]:
    """The script, which imports those beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("predict_gpu")


def test_no_step_is_predicted_to_take_longer_than_the_committed_ones(predict: ModuleType) -> None:
    """Where a change is worth it, or saves time: `python benchmarks/predict_gpu.py --commit_table`."""
    assert predict.changed(json.loads(predict.COMMITTED.read_text()), predict.table()) == []


def test_a_copy_more_in_each_layer_is_noticed(predict: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    filled_up, before = flex._filled_up, predict.table({"grpo": (3,)})
    monkeypatch.setattr(flex, "_filled_up", lambda *given: filled_up(*given).clone())
    [line] = predict.changed(before, predict.table({"grpo": (3,)}))
    assert line.startswith("grpo, tree@2316: ")
    assert "(+" in line


def test_a_step_that_takes_less_is_to_be_committed(predict: ModuleType) -> None:
    assert predict.changed({"a": {"tree": 10.0, "tree@4": 10.0}}, {"a": {"tree": 10.29, "tree@4": 9.72}}) == []
    found = predict.changed({"a": {"tree": 10.0, "tree@4": 10.0}}, {"a": {"tree": 10.31, "tree@4": 9.68}})
    assert found == [
        "a, tree: 10.3 ms predicted, 10.0 committed (+3.1%)",
        "a, tree@4: 9.7 ms predicted, 10.0 committed (-3.2%)",
    ]


@pytest.mark.parametrize("name", ["tree", "flat"])
def test_recorded_products_and_pairs_are_those_of_the_flops(predict: ModuleType, name: str) -> None:
    case = predict.Case("qwen3-tiny", "ratio-6.5", name)
    found = predict.operations_of(case, torch.float32, "tiny", attention="cascade")
    flops = flop_model(predict.shape_without_data("qwen3-tiny", None, torch.float32))
    forest = Forest.from_trajectories(predict.workload_of("qwen3-tiny", "ratio-6.5", "tiny").trajectories)
    tokens = forest.num_tokens if name == "tree" else forest.num_flat_tokens
    rows = tree_head_rows(forest) if name == "tree" else flat_head_rows(forest)
    linear = (flops.linear + flops.linear_backward) * tokens + (flops.head + flops.head_backward) * rows
    assert sum(work(each) for each in found if each.kind == "product") == linear
    whole = flops.tree(forest) if name == "tree" else flops.flat(forest)
    attention = sum(work(each) for each in found if "attention" in each.kind)
    assert attention == pytest.approx(whole - linear)


def test_a_profile_gives_mean_rates(predict: ModuleType, tmp_path: Path) -> None:
    """As if each kind had taken a second: then rates are the work, and a prediction of the step is three seconds."""
    seconds = {"attention": 1.0, "attention_backward": 1.0, "product": 1.0, "moved": 1.0}
    about = dict.fromkeys(("card", "measured", "versions", "commit"), "")
    case = {"model": "qwen3-tiny", "workload": "grpo", "contestant": "tree"}
    launches = {"calls": 10**9, "seconds": 1.0}
    (tmp_path / "profile.json").write_text(
        json.dumps({**about, **case, "kernel_seconds": seconds, "launches": launches})
    )
    found = predict.of_profile(tmp_path / "profile.json")
    assert found.host_seconds == 1e-9
    forecast = found.step(predict.operations_of(predict.Case(*case.values()), torch.bfloat16))
    of_kinds = {kind: forecast.by_kind[kind] for kind in ("attention", "attention_backward")}
    assert of_kinds == {kind: pytest.approx(1.0) for kind in of_kinds}
    assert forecast.by_kind["product"] > 0.999  # some of these are bound by their bytes
