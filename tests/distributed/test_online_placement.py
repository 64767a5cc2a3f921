"""Placement in a run: parts of all ranks, costs of images."""

import numpy as np
import pytest
import torch

from treewise.distributed import online_placement
from treewise.distributed.online_placement import OnlinePlacer
from treewise.distributed.placement import CostModel
from treewise.tree.forest import Forest
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
