"""Seconds and FLOPs of a step by part: FLOPs as the model of `nn.flops` has them, nothing left out."""

import json

import numpy as np
import pytest
import torch

import treewise as tw
from treewise.engine import profiling
from treewise.engine.profiling import profile_step
from treewise.nn import lm_head
from treewise.nn.model_flops import flop_model
from treewise.testing import tiny_model

CPU = torch.device("cpu")


def engine_and_forest(max_tokens: int | None, lengths: tuple[int, int] = (40, 30)) -> tuple[tw.TreeEngine, tw.Forest]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 60, lengths[0])
    items = [tw.Trajectory(np.concatenate([shared, rng.integers(0, 60, lengths[1])])) for _ in range(3)]
    engine = tw.TreeEngine(tiny_model(num_hidden_layers=2), max_tokens, hold="never")
    return engine, tw.Forest.from_trajectories(items)


@pytest.mark.representatives("whole")
@pytest.mark.parametrize("max_tokens", [None, 35], ids=["whole", "budget"])
def test_flops_of_projections_and_head_are_those_of_the_model(max_tokens, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(lm_head.MAX_PADDED, "cpu", 0)  # rows of zeros are none of the model's
    engine, forest = engine_and_forest(max_tokens)
    out = engine.step(forest)
    found = profile_step(lambda: engine.step(forest), CPU, tmp_path / "trace.json")
    flops = flop_model(engine.model)
    linear = flops.linear * out.num_computed_tokens + flops.linear_backward * forest.num_tokens
    assert found.parts[profiling.PROJECTIONS].flops == linear
    head = (flops.head + flops.head_backward) * len(np.unique(forest.parent[forest.parent >= 0]))
    assert found.parts[profiling.HEAD].flops == head
    assert (profiling.GATEWAYS in found.parts or profiling.MERGING in found.parts) or max_tokens is None
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_all_seconds_are_in_a_part() -> None:
    engine, forest = engine_and_forest(None)
    engine.step(forest)
    found = profile_step(lambda: engine.step(forest), CPU)
    assert sum(each.seconds for each in found.parts.values()) == pytest.approx(found.seconds, rel=0.05)
    assert set(found.parts) <= set(profiling.PARTS)
    for part in (profiling.EMBEDDING, profiling.PROJECTIONS, profiling.HEAD, profiling.ADDING, profiling.HOST):
        assert found.parts[part].seconds > 0, part
    assert found.parts[profiling.HEAD].calls > 0


def test_pairs_of_attention_are_those_that_its_kernels_compute() -> None:
    """A chain is one causal square in each layer."""
    engine = tw.TreeEngine(tiny_model(num_hidden_layers=2))
    forest = tw.Forest.from_trajectories([tw.Trajectory(np.arange(50) % 60)])
    engine.step(forest)
    found = profile_step(lambda: engine.step(forest), CPU)
    ((_, cost),) = flop_model(engine.model).pair_forward
    assert found.parts[profiling.CAUSAL].flops == 3.5 * cost * 50 * 51 / 2
    assert profiling.RECTANGLES not in found.parts


def test_grouped_products_of_experts_count_once() -> None:
    """On a CPU one calls a product for each expert."""
    engine = tw.TreeEngine(tiny_model("qwen3_moe", num_hidden_layers=1), router_aux_loss=False)
    forest = tw.Forest.from_trajectories([tw.Trajectory(np.arange(50) % 60)])
    engine.step(forest)
    found = profile_step(lambda: engine.step(forest), CPU)
    flops = flop_model(engine.model)
    assert found.parts[profiling.PROJECTIONS].flops == (flops.linear + flops.linear_backward) * 50


def test_products_of_attention_are_no_projections() -> None:
    engine = tw.TreeEngine(tiny_model(num_hidden_layers=1), attention="reference")
    forest = tw.Forest.from_trajectories([tw.Trajectory(np.arange(50) % 60)])
    engine.step(forest)
    found = profile_step(lambda: engine.step(forest), CPU)
    flops = flop_model(engine.model)
    assert found.parts[profiling.PROJECTIONS].flops == (flops.linear + flops.linear_backward) * 50
    ((_, cost),) = flops.pair_forward
    assert found.parts[profiling.ATTENTION].flops == pytest.approx(3 * cost * 50 * 50, rel=0.01)
