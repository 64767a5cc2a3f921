"""The mask of a micro-batch with images that attend both ways."""

import numpy as np

from treewise import Forest, Trajectory
from treewise.nn.attention import TreeMask
from treewise.nn.attention.mask import LayerRule
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out

LAYOUT = lay_out(plan(Forest.from_trajectories([Trajectory([5, 9, 9, 9, 6])])), 0)
BEFORE = np.array([0, 0, 1, 2, 0])  # the three in the middle are an image


def test_keys_of_an_image_are_seen_from_its_first_row_on() -> None:
    assert TreeMask.from_layout(LAYOUT, BEFORE).lo.tolist() == [0, 1, 1, 1, 4]
    assert TreeMask.from_layout(LAYOUT, BEFORE).of_layer(LayerRule(1.0)).lo.tolist() == [0, 1, 1, 1, 4]


def test_where_only_windows_do_so_other_layers_are_causal() -> None:
    mask = TreeMask.from_layout(LAYOUT, BEFORE, only_windows=True)
    assert mask.of_layer(LayerRule(1.0, window=4)).lo.tolist() == [0, 1, 1, 1, 4]
    assert mask.of_layer(LayerRule(1.0)).lo.tolist() == [0, 1, 2, 3, 4]
