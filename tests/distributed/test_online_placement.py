"""Placement in a run: parts of all ranks, costs of images."""

import numpy as np
import pytest
import torch

from tests.image_models import IMAGE_TOKEN, png, seeing_model
from treewise.distributed import online_placement
from treewise.distributed.online_placement import OnlinePlacer, costs_of_flops, image_tokens_of
from treewise.distributed.placement import CostModel
from treewise.nn.model_flops import flop_model
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
        part = OnlinePlacer(PRIOR, 64, "per_trajectory").own_part(batch)
        lengths += [forest.num_trajectories for forest in part]
    assert sum(lengths) == 12


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
    placer = OnlinePlacer(costs_of_flops(flops), None, "per_trajectory", image_tokens=tokens)
    monkeypatch.setattr(online_placement.ranks, "count", lambda: 2)
    monkeypatch.setattr(online_placement.ranks, "own", lambda: 0)
    part = placer.own_part([seeing, *reading])
    has_images = any(len(tree.images) for tree in part)
    assert len(part) == (4 if has_images else 6)  # with a tower that cost nothing, five each
