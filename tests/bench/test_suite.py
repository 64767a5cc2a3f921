"""The bound of a GPU: FLOPs of a chain by hand, blocks as FlexAttention counts them, bytes where they are more."""

import numpy as np
import pytest

from treewise.bench.suite import Gpu, bound_seconds
from treewise.nn.flops import flop_model
from treewise.planning.partition import ATTENTION_BACKWARD
from treewise.testing import tiny_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


def test_a_chain_costs_the_same_flat_and_as_a_tree() -> None:
    forest = Forest.from_trajectories([Trajectory(np.arange(300) % 60)])
    flops = flop_model(tiny_model())
    seconds = bound_seconds(flops, forest, Gpu(1e9, 1e30))
    assert seconds["flat"] == seconds["tree"]
    ((_, pair),) = flops.pair_forward
    attention = (1 + ATTENTION_BACKWARD) * pair * 6 * 128**2  # 3 x 4 / 2 blocks
    linear = (flops.linear + flops.linear_backward) * 300 + (flops.head + flops.head_backward) * 299
    assert seconds["tree"] == pytest.approx((attention + linear) / 1e9)


def test_shared_tokens_cost_once_and_bytes_count_where_they_are_slower() -> None:
    shared = np.arange(256) % 60
    items = [Trajectory(np.concatenate([shared, np.full(128, last)])) for last in (61, 62, 63, 64)]
    forest, flops = Forest.from_trajectories(items), flop_model(tiny_model())
    fast = bound_seconds(flops, forest, Gpu(1e12, 1e30))
    assert fast["flat"] / fast["tree"] == pytest.approx(flops.flat(forest) / flops.tree(forest), rel=0.15)
    slow = bound_seconds(flops, forest, Gpu(1e12, 1e6))
    assert slow["tree"] > fast["tree"]
