"""Costs of towers against counted FLOPs, and what images add to the costs of forests and plans."""

from dataclasses import replace

import numpy as np
import pytest

from tests.image_capability import HISTORIES, cost_ratio, image_model, trajectory
from tests.vision_models import FAMILIES
from treewise.nn.flops import flop_model
from treewise.planning.planner import plan
from treewise.report import report_plan
from treewise.tree.forest import Forest

ROWS = 4


@pytest.fixture(scope="module")
def llava():
    return image_model("llava")


@pytest.fixture(scope="module")
def forest():
    return Forest.from_trajectories([trajectory(each, ROWS) for each in HISTORIES])


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_flops_of_a_tower_are_those_that_are_counted(family):
    assert 0.85 < cost_ratio(image_model(family)) < 1.15


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
    report = report_plan(made, costs, "llava")
    kept = 4 * 3 * ROWS * costs.vision.activation_values if costs.keeps_images(made) else 0
    assert report.bytes_images == pytest.approx(kept, abs=4)
    parts = (report.bytes_weights, report.bytes_activations, report.bytes_images, report.bytes_gateways)
    assert report.bytes_peak == sum(parts)


def test_plans_of_a_frozen_tower_are_those_of_the_text():
    model = image_model("llava")
    model.model.vision_tower.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(False)
    items = Forest.from_trajectories([trajectory(each, ROWS) for each in HISTORIES])
    assert repr(flop_model(model).plan(items, 12)) == repr(plan(items, 12))
