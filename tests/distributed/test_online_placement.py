"""Placement in a run: parts of all ranks; costs that are fitted once and kept in checkpoints."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.image_models import IMAGE_TOKEN, png, seeing_model
from treewise.distributed import online_placement
from treewise.distributed.online_placement import (
    FIT_STEPS,
    NO_WORK,
    OnlinePlacer,
    fit_costs,
    image_tokens_of,
    measures_costs,
    prior_of,
)
from treewise.distributed.placement import CostModel, Work, work_of
from treewise.nn.model_flops import flop_model
from treewise.planning.planner import plan
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

PRIOR = CostModel(1.0, 0.01, 100.0)
CPU = torch.device("cpu")


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return [Forest.from_trajectories([Trajectory(rng.integers(0, 9, 30)) for _ in range(3)]) for _ in range(4)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_of_all_ranks_are_every_trajectory_once(monkeypatch, batch, num_ranks):
    monkeypatch.setattr(online_placement.ranks, "count", lambda: num_ranks)
    lengths = []
    for rank in range(num_ranks):
        monkeypatch.setattr(online_placement.ranks, "own", lambda rank=rank: rank)
        part = OnlinePlacer(PRIOR, 64, "per_trajectory").own_part(0, batch)
        lengths += [forest.num_trajectories for forest in part]
    assert sum(lengths) == 12


def measure(placer, batch, num_steps, first=1):
    """Steps `first` to `num_steps`, of one batch each."""
    for step in range(first, num_steps + 1):
        with placer.measure(plan(Forest.concatenate(batch), 64), CPU):
            pass
        placer.on_step_end(step)


@pytest.mark.parametrize("saved_at", [None, 2, 5])
def test_costs_are_fitted_once_hold_after_the_next_step_and_are_kept(batch, saved_at):
    placer = OnlinePlacer(PRIOR, 64, "per_trajectory")
    fitted_at = 5 if saved_at == 5 else FIT_STEPS  # a save after two steps has nothing to fit to
    measure(placer, batch, saved_at or 1)
    if saved_at:
        placer.before_save(saved_at)
    assert (len(placer.state()) > 1) == (saved_at == 5)
    measure(placer, batch, FIT_STEPS, first=(saved_at or 1) + 1)
    assert placer.costs_at(fitted_at) == PRIOR  # the next step is placed already
    assert placer.costs_at(fitted_at + 1) != PRIOR
    fitted = placer.state()
    measure(placer, batch, FIT_STEPS)
    placer.before_save(40)
    assert placer.state() == fitted
    again = OnlinePlacer(PRIOR, 64, "per_trajectory")
    again.restore(json.loads(json.dumps(fitted)))
    assert [again.costs_at(step) for step in (0, fitted_at + 1)] == [PRIOR, placer.costs_at(fitted_at + 1)]
    assert not again.is_measuring


def test_costs_that_are_not_measured_stay_those_of_flops(batch):
    placer = OnlinePlacer(PRIOR, 64, "per_trajectory", fits=False)
    measure(placer, batch, 2 * FIT_STEPS)
    placer.before_save(40)
    assert placer.state() == [[0, 1.0, 0.01, 100.0]]


@pytest.mark.parametrize(
    ("source", "device", "is_deterministic", "expected"),
    [
        ("auto", "cpu", False, False),
        ("auto", "cuda", False, True),
        ("auto", "cuda", True, False),
        ("measured", "cpu", True, True),
        ("flops", "cuda", False, False),
    ],
)
def test_costs_are_measured_where_runs_do_not_repeat_anyway(source, device, is_deterministic, expected):
    assert measures_costs(source, torch.device(device), is_deterministic) == expected


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_all_take_the_time_of_the_slowest_are_fitted_to_it(seed):
    """From a prior whose pairs cost a quarter of what they do; fitted to every rank, batches are off by half."""
    rng = np.random.default_rng(seed)
    true, prior = CostModel(2e-6, 4e-9, 3e-3), CostModel(1e-6, 0.5e-9, 1.5e-3)

    def batch():
        works = [Work(*(rng.integers(1, 9, 3) * (1000.0, 400_000.0, 1.0))) for _ in range(2)]
        passes = max(each.micro_batches for each in works)
        return works, [replace(each, micro_batches=passes) for each in works]

    measured = [[], []]
    for _ in range(FIT_STEPS - 1):
        works, as_run = batch()
        seconds = max(map(true.seconds, as_run)) * rng.uniform(0.97, 1.03)
        for rank, work in enumerate(works):
            measured[rank].append((work, seconds * (1 + 0.2 * rank)))  # the second rank waited for the batch to begin
    held_out = [batch()[1] for _ in range(100)]

    def error(costs):
        return np.median([abs(max(map(costs.seconds, w)) / max(map(true.seconds, w)) - 1) for w in held_out])

    assert error(fit_costs(prior, measured, in_lockstep=True)) < 0.05 < error(prior)
    assert error(fit_costs(prior, measured, in_lockstep=False)) > 0.1


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_a_batch_of_no_trees_is_no_measurement(batch, in_lockstep):
    work = work_of(plan(Forest.concatenate(batch), 64))
    both, one = ([[(work, 0.1)], [(NO_WORK, 0.1)]], [[(work, 0.1)]])
    assert fit_costs(PRIOR, both, in_lockstep=in_lockstep) == fit_costs(PRIOR, one, in_lockstep=in_lockstep) != PRIOR
    assert fit_costs(PRIOR, [[(NO_WORK, 0.1)]] * 2, in_lockstep=in_lockstep) == PRIOR


def test_a_tree_of_images_is_balanced_by_the_flops_of_its_tower(monkeypatch):
    """And the work of a plan counts each of its distinct images once."""
    flops = flop_model(seeing_model("qwen2_5_vl"))
    tokens = image_tokens_of(flops)
    ids, weights = np.where(np.arange(40) < 32, IMAGE_TOKEN, 5), np.arange(40) > 37
    spans = tuple(ImageSpan(png(1), start, start + 8) for start in (0, 8, 16, 24))  # one picture at four places
    seeing = Forest.from_trajectories([Trajectory(ids, weights, images=spans)])
    reading = [Forest.from_trajectories([Trajectory(np.full(40, number), weights)]) for number in range(9)]
    tower = flops.tree(seeing) - flops.tree(reading[0])
    per_token = flops.linear + flops.linear_backward + flops.head + flops.head_backward
    assert tokens(seeing) == pytest.approx(np.full(4, tower / per_token))
    assert tower / per_token > 40  # more than the tree beside it
    placer = OnlinePlacer(prior_of(flops), None, "per_trajectory", image_tokens=tokens)
    monkeypatch.setattr(online_placement.ranks, "count", lambda: 2)
    monkeypatch.setattr(online_placement.ranks, "own", lambda: 0)
    part = placer.own_part(0, [seeing, *reading])
    has_images = any(len(tree.images) for tree in part)
    assert len(part) == (4 if has_images else 6)  # with a tower that cost nothing, five each
    with placer.measure(plan(seeing), CPU):
        pass
    assert placer._measurements[0][0].tokens == pytest.approx(40 + tower / per_token)
