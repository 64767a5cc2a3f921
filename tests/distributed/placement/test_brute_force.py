"""Placements of small steps against every way to place them, costs taken from the plans of all possible shares."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from treewise.distributed.placement import CostModel, Placement, assign_ranks, rank_part, restrict_forest, work_of
from treewise.distributed.placement.leaf_costs import costs_of
from treewise.planning.planner import plan
from treewise.testing.strategies import random_tree
from treewise.tree.declared import chain_nodes
from treewise.tree.forest import Forest

SHAPES = Path(__file__).parents[3] / "examples" / "data" / "tree_shapes.json.gz"
# A 1.7B model: a pair costs as much as 0.00008 tokens, so attention is 40 % of the cost at 16,000 tokens.
REAL_COST = CostModel.from_flops(flops_per_token=6 * 1.7e9, flops_per_pair=3.5 * 4 * 2048 * 28)
COST = CostModel(seconds_per_token=1.0, seconds_per_pair=0.01, seconds_per_micro_batch=0.0)
NUM_LEAVES = {2: 9, 3: 8, 4: 7, 5: 7}


def fewest_seconds(forests, num_ranks, cost, max_tokens):
    """Of the slowest rank, over all partitions of the trajectories; each possible share is planned and priced."""
    number = sum(forest.num_trajectories for forest in forests)
    everything = 2**number
    alone = np.zeros(everything)
    for mask in range(1, everything):
        chosen = Placement(np.array([(mask >> bit) & 1 for bit in range(number)]), np.zeros(2), 0.0)
        alone[mask] = cost.seconds(work_of(plan(rank_part(forests, chosen, 1), max_tokens)))
    best = alone.copy()
    for _ in range(num_ranks - 1):
        longer = best.copy()
        for mask in range(1, everything):
            part = mask
            while part:  # all subsets of what is to be placed are tried as the share of one more rank
                longer[mask] = min(longer[mask], max(alone[part], best[mask ^ part]))
                part = (part - 1) & mask
        best = longer
    return best[-1]


def recorded():
    for shape in json.loads(gzip.decompress(SHAPES.read_bytes())):
        length = np.array(shape["length"])
        start = np.cumsum(length) - length
        segments = chain_nodes(np.array(shape["parent"]), length, np.array(shape["ends"]), start)
        yield Forest(segments, np.zeros(segments.num_tokens, dtype=np.int32), None, {})


REAL = list(recorded())


def few_leaves(rng, trees, at_most):
    """Trees, each cut down to a few of its trajectories, so that all together have `at_most`."""
    found, left = [], at_most
    while left:
        tree = trees(rng)
        number = min(int(rng.integers(1, 7)), left, tree.num_trajectories)
        found.append(restrict_forest(tree, np.sort(rng.choice(tree.num_trajectories, number, replace=False))))
        left -= number
    return found


def real_tree(rng):
    return REAL[int(rng.integers(len(REAL)))]


def made_tree(rng):
    return random_tree(rng, int(rng.integers(1, 30)), 40)


@pytest.mark.representatives("0-made", "1-real", "4-made", "6-real")
@pytest.mark.parametrize("kind", ["real", "made"])
@pytest.mark.parametrize("seed", range(10))
def test_small_steps_are_within_two_hundredths_of_the_best(seed, kind):
    rng = np.random.default_rng([seed, kind == "made"])
    num_ranks = 2 + seed % 4
    trees, cost = (real_tree, REAL_COST) if kind == "real" else (made_tree, COST)
    forests = few_leaves(rng, trees, NUM_LEAVES[num_ranks])
    longest = max(int(forest.path_lengths.max()) for forest in forests)
    num_tokens = sum(forest.num_tokens for forest in forests)
    # Whole; budgets that cut every path, no path, and each rank's share about once.
    budgets = None, -(-longest // 3), longest, max(num_tokens // num_ranks // 2, 16)
    max_tokens = budgets[int(rng.integers(len(budgets)))]
    found = assign_ranks(forests, num_ranks, cost, max_tokens=max_tokens, split="trajectories")
    shares = [rank_part(forests, found, rank) for rank in range(num_ranks)]
    true = np.array([cost.seconds(work_of(plan(share, max_tokens))) if share else 0.0 for share in shares])
    best = fewest_seconds(forests, num_ranks, cost, max_tokens)
    np.testing.assert_allclose(found.seconds, true, rtol=0.001)
    assert true.max() <= 1.02 * best
    assert found.bound_seconds <= 1.0001 * best


@pytest.mark.representatives("4096-16", "16384-4", "16384-32")
@pytest.mark.parametrize("num_ranks", [4, 8, 16, 32])
@pytest.mark.parametrize("max_tokens", [4096, 16_384])
def test_steps_of_real_trees_are_even_and_predicted(num_ranks, max_tokens):
    """As their plans say. A single path that costs more than the mean of all ranks is the only excuse."""
    rng = np.random.default_rng([num_ranks, max_tokens])
    short = [tree for tree in REAL if tree.path_lengths.max() <= 16_384]
    chosen = [short[number] for number in rng.choice(len(short), 3 * num_ranks + 20, replace=False)]
    found = assign_ranks(chosen, num_ranks, REAL_COST, max_tokens=max_tokens)
    shares = [rank_part(chosen, found, rank) for rank in range(num_ranks)]
    true = np.array([REAL_COST.seconds(work_of(plan(share, max_tokens))) for share in shares])
    np.testing.assert_allclose(found.seconds, true, rtol=0.01)
    assert true.max() <= 1.03 * max(true.mean(), found.bound_seconds)


def test_a_bound_is_the_most_expensive_path_or_the_mean():
    # Two ranks, one tree: a prompt of 60 and two samples of 40. Cut, each computes the prompt; whole, one computes all.
    forest = Forest.from_nodes([-1, 0, 0], [[1] * 60, [2] * 40, [3] * 40])
    found = assign_ranks([forest], 2, CostModel(1.0, 0.0, 0.0), split="trajectories")
    assert found.seconds.tolist() == pytest.approx([100, 100])
    assert found.bound_seconds == pytest.approx(100)
    forest = Forest.from_nodes([-1, 0, 0, 0], [[1] * 60, [2] * 40, [3] * 40, [4] * 40])
    found = assign_ranks([forest, forest, forest], 4, CostModel(1.0, 0.0, 0.0), split="trajectories")
    assert found.bound_seconds == pytest.approx(3 * 180 / 4)  # no prompt is copied
    assert found.seconds.max() >= found.bound_seconds * (1 - 1e-9)


@pytest.mark.parametrize("max_tokens", [4096, 16_384])
def test_open_tokens_cost_the_same_beside_other_trees(max_tokens):
    """But for launches: small trunks of several trees may share one."""
    trees = REAL[::3]
    step = costs_of(trees, REAL_COST, max_tokens)
    roots = np.flatnonzero(step.segments.parent < 0)
    together = np.add.reduceat(step.recompute, roots) * step.seconds_per_unit
    for tree, seconds in zip(trees, together, strict=True):
        alone = costs_of([tree], REAL_COST, max_tokens)
        expected = alone.recompute.sum() * alone.seconds_per_unit
        assert seconds == pytest.approx(expected, rel=1e-6, abs=2 * REAL_COST.seconds_per_micro_batch)
