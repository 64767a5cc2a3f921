"""Costs of towers against counted FLOPs, and what images add to the costs of forests and plans."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.image_capability import HISTORIES, cost_ratios, image_model, trajectory
from tests.needs import IMAGES
from treewise.engine.step_memory import step_memory
from treewise.nn.model_flops import flop_model
from treewise.nn.support_table import own_table
from treewise.nn.vision import costs as costs_module
from treewise.planning.planner import plan
from treewise.report import report_plan
from treewise.tree.forest import Forest

pytestmark = IMAGES
ROWS = 4
# Tiles, windows, any size, a tower with its own attention, a perceiver, extra features; the others with the exhaustive.
TRIED = {"llava", "qwen2_5_vl", "mistral3", "got_ocr2", "idefics2", "qwen3_vl"}


@pytest.fixture(scope="module")
def llava():
    return image_model("llava")


@pytest.fixture(scope="module")
def forest():
    return Forest.from_trajectories([trajectory(each, ROWS) for each in HISTORIES])


@pytest.mark.representatives("qwen2_5_vl", "llava")
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[] if each in TRIED else pytest.mark.exhaustive) for each in own_table().with_images()],
)
def test_predicted_flops_of_a_tower_are_those_that_are_counted(family):
    """Of an image of a few rows, whose windows are not full, or which has more tokens (HunYuan's ends of rows)."""
    assert cost_ratios(image_model(family)) == pytest.approx((1.0, 1.0), abs=0.3 if family == "hunyuan_vl" else 0.1)


def test_a_tower_of_any_size_costs_what_is_counted_at_other_sizes_than_those_it_was_fitted_to():
    model = image_model("qwen2_5_vl")
    costs = flop_model(model).vision
    for side in (4, 6, 12):
        counted = _tower_flops(model, side)
        assert float(costs.forward(np.array([side**2]))[0]) == pytest.approx(counted, rel=1e-6)


def _tower_flops(model, side):
    """Of a forward of an image of `side` x `side` feature rows."""
    patches = 4 * side**2
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.model.get_image_features(
            torch.zeros(patches, 3 * 2 * 8**2), torch.tensor([[1, 2 * side, 2 * side]]), return_dict=True
        )
    return counter.get_total_flops()


def test_an_adapter_on_a_frozen_tower_costs_a_backward_through_what_follows_it():
    from peft import LoraConfig, get_peft_model

    trained = flop_model(image_model("llava")).vision
    adapted = get_peft_model(image_model("llava"), LoraConfig(target_modules=r".*vision_tower.*layers\.1.*q_proj"))
    calls = []
    adapted.base_model.model.model.vision_tower.register_forward_pre_hook(lambda *_: calls.append(1))
    costs, rows = flop_model(adapted).vision, np.array([ROWS])
    assert costs.forward(rows) == trained.forward(rows)
    assert costs.is_attention_trained
    assert 0 < costs.step(rows) - costs.forward(rows) < 0.5 * (trained.step(rows) - trained.forward(rows))
    assert not calls  # the model itself does not run


def test_a_tower_that_cannot_be_counted_costs_nothing_and_is_told(caplog, monkeypatch):
    model = image_model("aya_vision")
    monkeypatch.setattr(costs_module, "pixel_forms", lambda *_: iter([{"pixel_values": (1, 2, 3)}]))
    monkeypatch.setattr(costs_module, "_costs_of", {})
    with caplog.at_level("WARNING", logger="treewise"):
        costs = flop_model(model).vision
    assert costs.step(np.array([ROWS])).tolist() == [0.0]
    why = r"takes none of 2 forms of pixels \(\w+Error: .+\), so costs and plans leave images out"
    assert re.search(rf"AyaVision\w+: its vision tower {why}", caplog.text)


def test_flat_training_runs_the_tower_for_each_image_and_a_tree_once_for_each_distinct_one(llava, forest):
    costs = flop_model(llava)
    text = replace(costs, vision=None)
    assert costs.vision.rows_of(forest).tolist() == [ROWS] * len(forest.images)
    one = float(costs.vision.step(np.array([ROWS]))[0])
    assert sum(len(each.images) for each in forest.trajectories) == 9
    assert costs.flat(forest) == pytest.approx(text.flat(forest) + 9 * one)
    assert costs.native_flat(forest) == pytest.approx(text.native_flat(forest) + 9 * one)
    assert costs.tree(forest) == pytest.approx(text.tree(forest) + 3 * one)
    contained = Forest.from_trajectories([*forest.trajectories, trajectory(HISTORIES[0][:3], ROWS)])
    assert costs.leaf(contained) == pytest.approx(text.leaf(contained) + 9 * one)


def test_a_frozen_tower_has_no_backward():
    model = image_model("llava")
    trained = flop_model(model).vision
    model.model.vision_tower.requires_grad_(False)
    projector = flop_model(model).vision
    model.model.multi_modal_projector.requires_grad_(False)
    frozen, rows = flop_model(model).vision, np.array([ROWS])
    assert frozen.step(rows) == frozen.forward(rows) == trained.forward(rows)
    assert frozen.activation_values == 0
    assert trained.step(rows) > projector.step(rows) > frozen.step(rows)


@pytest.mark.parametrize("budget", [12, 20, 26, 40, 10_000])
def test_a_plan_takes_the_cheaper_of_two_passes_of_the_tower_and_smaller_micro_batches(llava, forest, budget):
    costs = flop_model(llava)
    made, plain = costs.plan(forest, budget), plan(forest, budget)
    assert made.max_tokens == budget
    assert costs.planned(made) <= costs.planned(plain)
    largest = max(tokens for _, tokens in made.timeline)
    taken = costs.tokens_per_row * 3 * ROWS
    assert costs.keeps_images(made) == (largest + taken <= budget)
    again = float(costs.vision.forward(np.array([ROWS]))[0]) * 3
    extra = costs.recomputed(made) - replace(costs, vision=None).recomputed(made)
    assert extra == pytest.approx(0 if costs.keeps_images(made) else again)
    report = report_plan(made, costs, "llava", memory=partial(step_memory, llava))
    kept = 4 * 3 * ROWS * costs.vision.activation_values if costs.keeps_images(made) else 0
    assert report.bytes_images == pytest.approx(kept, abs=4)
    parts = (
        report.bytes_weights,
        report.bytes_activations,
        report.bytes_images,
        report.bytes_gateways,
        report.bytes_others,
        report.bytes_allocator,
    )
    assert report.bytes_peak == sum(parts)


def test_plans_of_a_frozen_tower_are_those_of_the_text():
    model = image_model("llava")
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)
    items = Forest.from_trajectories([trajectory(each, ROWS) for each in HISTORIES])
    assert repr(flop_model(model).plan(items, 12)) == repr(plan(items, 12))
