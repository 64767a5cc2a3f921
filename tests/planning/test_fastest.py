"""The fastest plan at or below a budget, against every budget that is tried and all others."""

import numpy as np
import pytest

from treewise.bench.workloads import make
from treewise.planning.fastest import fastest_plan, smaller_budgets
from treewise.planning.planner import plan
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


def agents(rng: np.random.Generator) -> Forest:
    """Two agents whose turns leave their path, and a group of samples; 500 to 3,000 tokens."""
    items = []
    for _ in range(2):
        path = rng.integers(3, 9_999, rng.integers(20, 200))
        for _ in range(rng.integers(4, 16)):
            items.append(np.concatenate([path, rng.integers(3, 9_999, rng.integers(5, 80))]))
            path = np.concatenate([path, rng.integers(3, 9_999, rng.integers(5, 60))])
    prompt = rng.integers(3, 9_999, rng.integers(20, 300))
    items += [np.concatenate([prompt, rng.integers(3, 9_999, rng.integers(30, 300))]) for _ in range(4)]
    return Forest.from_trajectories([Trajectory(ids.astype(np.int32)) for ids in items])


def test_it_is_the_cheapest_of_those_that_take_no_more_memory():
    rng = np.random.default_rng(0)
    num_smaller = 0
    for _ in range(30):
        forest = agents(rng)
        limit = int(forest.num_tokens * rng.choice([0.6, 0.4, 0.25, 0.15]))
        largest, found = plan(forest, limit), fastest_plan(forest, limit)
        budgets = [limit, *smaller_budgets(limit)]
        tried = [plan(forest, budget, hold=hold) for budget in budgets for hold in ("auto", "never")]
        fit = [each for each in tried if needs(each, limit) <= needs(largest, limit)]
        assert found.relative_cost == min(each.relative_cost for each in fit)
        assert needs(found, limit) <= needs(largest, limit)
        num_smaller += found.max_tokens < limit
        cheapest = min(plan(forest, budget).relative_cost for budget in range(limit // 2, limit + 1, 1 + limit // 24))
        assert found.relative_cost <= 1.03 * cheapest
    assert num_smaller > 0


def needs(made, limit: int) -> int:
    """Tokens with activations and gateway tokens, as if a gateway token took as much."""
    return min(made.max_tokens, limit) + made.peak_gateway_tokens


@pytest.mark.parametrize("least", [200, 400])
def test_smaller_pieces_where_micro_batches_wait_for_the_host(least: int):
    rng = np.random.default_rng(1)
    num_better = 0
    for _ in range(20):
        forest = agents(rng)
        limit = int(forest.num_tokens * rng.choice([0.6, 0.4, 0.25]))
        largest, found = plan(forest, limit), fastest_plan(forest, limit, least_tokens=least)
        assert found.cost(least) <= fastest_plan(forest, limit).cost(least) <= largest.cost(least)
        live = max(tokens for _, tokens in found.timeline)
        assert live <= limit
        assert live + found.peak_gateway_tokens <= limit + largest.peak_gateway_tokens + limit / 8
        positions = np.concatenate([batch.positions() for batch in found.micro_batches])
        assert np.array_equal(np.sort(positions), np.arange(forest.num_tokens))
        num_better += found.cost(least) < 0.99 * fastest_plan(forest, limit).cost(least)
    assert num_better > 0


def test_a_cost_counts_each_micro_batch_as_at_least_so_many_tokens():
    forest = Forest.from_trajectories([Trajectory(np.arange(start, start + 100)) for start in (0, 200)])
    made = plan(forest, 100)
    assert made.cost() == made.cost(100) == made.relative_cost == 200 + 2 * 64
    assert made.cost(150) == made.relative_cost + 2 * 50


# Tokens that take an H100 as long as its host launches the kernels of Qwen3-1.7B, and workloads measured there.
@pytest.mark.parametrize(("workload", "share", "before"), [("ratio-6.5", 0.97, 0.75), ("tau2", 0.9, 0.9)])
def test_a_third_of_the_trees_that_an_h100_measured(workload: str, share: float, before: float):
    forest = Forest.from_trajectories(list(make(workload, "full", 151_936).trajectories))
    limit, least = forest.num_tokens // 3, 4_800
    plain, found = plan(forest, limit), fastest_plan(forest, limit, least_tokens=least)
    bound = forest.num_tokens + plain.num_recomputed_tokens / 3  # what recomputation leaves
    assert bound / found.cost(least) >= share
    assert bound / plain.cost(least) < before


# 4,800 with plain layers, 1,920 with compiled ones (`nn.launching`).
@pytest.mark.parametrize("least", [4_800, 1_920])
@pytest.mark.parametrize("workload", ["ratio-6.5", "tau2", "164k-83k"])
def test_a_tenth_of_a_tree_is_bound_by_its_launches(workload: str, least: int):
    """Beside the least of any plan that recomputes as many tokens, with no more alive than the budget."""
    forest = Forest.from_trajectories(list(make(workload, "full", 151_936).trajectories))
    limit = forest.num_tokens // 10
    twice = plan(forest, limit).num_recomputed_tokens
    passes, forwards = -(-forest.num_tokens // limit), -(-twice // limit)
    tokens = max(forest.num_tokens, passes * least) + max(twice, forwards * least) / 3
    bound = tokens + 64 * (passes + forwards / 3)
    assert 1 <= fastest_plan(forest, limit, least_tokens=least).cost(least) / bound <= 1.15


@pytest.mark.parametrize("max_tokens", [None, 57, 100])
def test_a_forest_that_fits_stays_whole(max_tokens: int | None):
    forest = Forest.from_trajectories([Trajectory(np.arange(57, dtype=np.int32))])
    assert fastest_plan(forest, max_tokens).is_whole


def test_budgets_of_few_tokens():
    assert smaller_budgets(1) == []
    assert smaller_budgets(2) == [1]
    assert smaller_budgets(32) == [30, 28, 26, 24]


def test_nothing_is_held_where_pieces_then_share_a_micro_batch():
    forest = Forest.from_trajectories(list(make("search", "cpu", 8_192).trajectories))
    largest, found = plan(forest, 126), fastest_plan(forest, 126)
    assert (largest.num_micro_batches, largest.num_held_tokens) == (6, 44)
    assert (found.num_micro_batches, found.num_held_tokens) == (5, 0)
