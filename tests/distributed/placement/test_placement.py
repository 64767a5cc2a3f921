"""Placements: every trajectory once, loads as the shares' own work says, near what trying everything finds."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.distributed.placement import CostModel, Placement, assign_ranks, rank_part, search, work_of
from treewise.distributed.placement.leaf_costs import costs_of
from treewise.distributed.placement.placement import part_costs
from treewise.distributed.placement.search import best_owners, loads_of, longest_first
from treewise.errors import ConfigError, DataError, PlanError
from treewise.planning.partition import FORWARD_FRACTION
from treewise.planning.planner import plan
from treewise.testing.strategies import forests
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

COST = CostModel(seconds_per_token=1.0, seconds_per_pair=0.01, seconds_per_micro_batch=0.0)
SPLITS = ("rollouts", "trajectories", "never")


def declared(rng, num_nodes, max_tokens=30):
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, num_nodes)]
    return Forest.from_nodes(parents, [[1] * int(rng.integers(2, max_tokens)) for _ in parents], merge_siblings=False)


def samples(rng, prompt, lengths, rollouts=None):
    """Samples of one prompt, as they come from a policy."""
    head = rng.integers(0, 100, prompt).tolist()
    return Forest.from_trajectories(
        [
            Trajectory([*head, 1000 + number, *rng.integers(0, 100, length).tolist()], rollout=rollout)
            for number, (length, rollout) in enumerate(zip(lengths, rollouts or [None] * len(lengths), strict=True))
        ]
    )


def true_seconds(share, cost, max_tokens=None):
    return sum(cost.seconds(work_of(plan(forest, max_tokens))) for forest in share)


@given(st.lists(forests(), min_size=1, max_size=4), st.integers(1, 5), st.sampled_from(SPLITS))
def test_every_trajectory_goes_to_one_rank_and_loads_are_true(some, num_ranks, split):
    found = assign_ranks(some, num_ranks, COST, split=split)
    assert len(found.rank_of_trajectory) == sum(forest.num_trajectories for forest in some)
    shares = [rank_part(some, found, rank) for rank in range(num_ranks)]
    held = [id(item) for share in shares for forest in share for item in forest.trajectories]
    assert sorted(held) == sorted(id(item) for forest in some for item in forest.trajectories)
    np.testing.assert_allclose(found.seconds, [true_seconds(share, COST) for share in shares], rtol=1e-6, atol=1e-6)
    assert found.seconds.max() >= found.bound_seconds * (1 - 1e-9)


@given(st.lists(forests(), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_loads_are_true_for_any_owners(some, num_ranks, seed, is_joined):
    rng = np.random.default_rng(seed)
    leaves = costs_of(some, COST, None).leaves()
    if is_joined:
        leaves = leaves.joined(np.append(True, rng.random(len(leaves.new) - 1) < 0.6))
    owners = rng.integers(0, num_ranks, len(leaves.new))
    loads = loads_of(leaves, owners, num_ranks) * leaves.seconds_per_unit
    placed = Placement(owners[leaves.of_trajectory], loads, 0.0)
    expected = [true_seconds(rank_part(some, placed, rank), COST) for rank in range(num_ranks)]
    np.testing.assert_allclose(loads, expected, rtol=1e-6, atol=1e-6)


@given(st.lists(forests(), min_size=1, max_size=3), st.integers(1, 4))
def test_trees_stay_whole_where_asked(some, num_ranks):
    found = assign_ranks(some, num_ranks, COST, split="never")
    for forest, ranks in zip(some, np.split(found.rank_of_trajectory, _ends(some)), strict=True):
        tree = np.searchsorted(forest.tree_starts, forest.ends, side="right")
        for number in range(1, forest.num_trees + 1):
            assert len(set(ranks[tree == number].tolist())) == 1


@given(st.lists(forests(), min_size=1, max_size=3), st.integers(2, 4), st.data())
def test_rollouts_stay_together(some, num_ranks, data):
    for forest in some:
        names = data.draw(
            st.lists(st.integers(0, 3), min_size=forest.num_trajectories, max_size=forest.num_trajectories)
        )
        for item, name in zip(forest.trajectories, names, strict=True):
            object.__setattr__(item, "rollout", name)
    found = assign_ranks(some, num_ranks, COST)
    for forest, ranks in zip(some, np.split(found.rank_of_trajectory, _ends(some)), strict=True):
        for number in range(int(forest.rollout_of_trajectory.max()) + 1):
            assert len(set(ranks[forest.rollout_of_trajectory == number].tolist())) == 1
    shares = [rank_part(some, found, rank) for rank in range(num_ranks)]
    np.testing.assert_allclose(found.seconds, [true_seconds(share, COST) for share in shares], rtol=1e-6, atol=1e-6)


def _ends(some):
    return np.cumsum([forest.num_trajectories for forest in some])[:-1]


@pytest.mark.representatives("8", "16")
@pytest.mark.parametrize("num_ranks", [4, 8, 16, 32, 64])
def test_steps_of_many_trees_are_even(num_ranks):
    """And predicted to be faster than without a search: trees longest first, whole or cut where a rank is full, or all
    leaves in order, cut into runs of one cost."""
    rng = np.random.default_rng(num_ranks)
    # Like agents' rollouts: a few samples of a long prompt, lengths over two orders of magnitude.
    trees = []
    for _ in range(max(32, 2 * num_ranks)):
        lengths = rng.lognormal(5, 0.7, 8).astype(int) + 1
        trees.append(samples(rng, int(rng.integers(50, 400)), lengths))
    cost = CostModel(1.0, 1e-4, 64.0)
    found = assign_ranks(trees, num_ranks, cost, max_tokens=1024)
    step = costs_of(trees, cost, 1024)
    leaves = step.leaves()
    mean = int(leaves.before[-1]) // num_ranks
    simple = [longest_first(leaves, num_ranks, room and int(mean * room)) for room in (None, 1.0, 1.1, 1.3)]
    simple.append(np.minimum(leaves.before[:-1] // mean, num_ranks - 1))
    loads = [part_costs(step, owners[leaves.of_trajectory], num_ranks).loads for owners in simple]
    assert found.imbalance <= 1.03
    assert found.seconds.max() < min(each.max() for each in loads) * step.seconds_per_unit


def test_fewer_trees_than_ranks_are_cut():
    rng = np.random.default_rng(0)
    trees = [samples(rng, 20, [200] * 16) for _ in range(4)]
    found = assign_ranks(trees, 16, COST)
    assert found.imbalance < 1.01
    assert found.seconds.max() < assign_ranks(trees, 16, COST, split="never").seconds.max() / 3


@given(st.lists(forests(), min_size=1, max_size=4), st.integers(1, 5))
def test_the_search_never_makes_a_placement_slower(some, num_ranks):
    leaves, none = costs_of(some, COST, None).leaves(), np.zeros(num_ranks, dtype=np.int64)
    least = max(-(-int(leaves.before[-1]) // num_ranks), int(leaves.path_cost.max()))
    whole, cut = (longest_first(leaves, num_ranks, capacity) for capacity in (None, least))
    for owners in (whole, cut):
        assert ((owners >= 0) & (owners < num_ranks)).all()
        better = loads_of(leaves, best_owners(leaves, none, 0, owners), num_ranks)
        assert least <= better.max() <= loads_of(leaves, owners, num_ranks).max()
    assert not ((np.diff(whole) != 0) & (np.diff(leaves.tree) == 0)).any()  # no tree is cut
    alone = best_owners(leaves, none, 0)
    assert loads_of(leaves, alone, num_ranks).max() <= loads_of(leaves, whole, num_ranks).max()


def test_placements_repeat_and_need_shapes_only():
    rng = np.random.default_rng(3)
    trees = [declared(rng, int(rng.integers(5, 40))) for _ in range(20)]
    one = assign_ranks(trees, 8, COST, max_tokens=64, split="trajectories")
    two = assign_ranks([forest.segments for forest in trees], 8, COST, max_tokens=64)
    np.testing.assert_array_equal(one.rank_of_trajectory, two.rank_of_trajectory)


def test_what_a_budget_computes_twice_is_counted():
    rng = np.random.default_rng(0)
    chain = Forest.from_trajectories([Trajectory(np.arange(1000))])
    cost = CostModel(1.0, 0.0, 0.0)
    seconds = assign_ranks([chain], 1, cost, max_tokens=100).seconds
    made = plan(chain, 100)
    assert made.num_recomputed_tokens > 0
    np.testing.assert_allclose(seconds, 1000 + FORWARD_FRACTION * made.num_recomputed_tokens, rtol=1e-9)
    trees = [declared(rng, 40) for _ in range(6)]
    for cost in (CostModel(1.0, 0.0, 0.0), CostModel(0.0, 1.0, 0.0)):
        seconds = assign_ranks(trees, 1, cost, max_tokens=64).seconds
        expected = sum(cost.seconds(work_of(plan(forest, 64))) for forest in trees)
        np.testing.assert_allclose(seconds, expected, rtol=1e-9)


def test_some_ranks_may_get_nothing():
    tree = Forest.from_trajectories([Trajectory([1, 2, 3])])
    found = assign_ranks([tree], 3, COST)
    assert sorted(found.seconds.tolist())[:2] == [0, 0]
    assert sum(len(rank_part([tree], found, rank)) for rank in range(3)) == 1


def test_bad_calls_are_refused():
    tree = Forest.from_trajectories([Trajectory([1, 2, 3])])
    with pytest.raises(PlanError, match="num_ranks is 0"):
        assign_ranks([tree], 0, COST)
    with pytest.raises(PlanError, match="max_tokens is 0"):
        assign_ranks([tree], 2, COST, max_tokens=0)
    with pytest.raises(PlanError, match="split='always' is unknown"):
        assign_ranks([tree], 2, COST, split="always")
    with pytest.raises(DataError, match="no forest to place"):
        assign_ranks([], 2, COST)
    with pytest.raises(DataError, match="2 trajectories for a placement of 1"):
        rank_part([tree, tree], assign_ranks([tree], 2, COST), 0)
    with pytest.raises(ConfigError, match="are both 0"):
        CostModel(0.0, 0.0, 1.0)


def test_imbalance_is_the_slowest_over_the_mean():
    assert Placement(np.zeros(1, dtype=np.int64), np.array([3.0, 1.0]), 2.0).imbalance == 1.5


@given(st.lists(st.integers(2, 300), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 64))
def test_mixed_lengths_never_exceed_the_budget(lengths, num_ranks, max_tokens):
    rng = np.random.default_rng(0)
    # A long tail: every seventh sample is ten times as long.
    rows = [Trajectory(rng.integers(0, 9, length * (10 if length % 7 == 0 else 1))) for length in lengths]
    samples_alone = [Forest.from_trajectories([row]) for row in rows]
    found = assign_ranks(samples_alone, num_ranks, COST, max_tokens=max_tokens)
    num_tokens = 0
    for rank in range(num_ranks):
        share = rank_part(samples_alone, found, rank)
        if share:
            made = plan(share, max_tokens)
            assert max(live for _, live in made.timeline) <= max_tokens
            num_tokens += made.forest.num_tokens
    assert num_tokens == sum(map(len, rows))  # nothing is dropped or cut off


def equal_shares(indices, num_ranks):
    """All ways to divide indices into shares of one size, ranks in any order."""
    if num_ranks == 1:
        yield [indices]
        return
    first, *rest = indices
    for others in combinations(rest, len(indices) // num_ranks - 1):
        left = [index for index in rest if index not in others]
        for shares in equal_shares(left, num_ranks - 1):
            yield [[first, *others], *shares]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_ranks_of_as_many_trajectories_are_near_the_best(seed, num_ranks):
    """Against every way to give each rank as many."""
    rng = np.random.default_rng(seed)
    sizes = [8] if seed == 0 else [4, 4] if seed < 4 else [1, 5, 2]
    some = [samples(rng, int(rng.integers(5, 60)), rng.integers(5, 80, size)) for size in sizes]
    found = assign_ranks(some, num_ranks, COST, split="trajectories", in_equal_number=True)
    assert np.bincount(found.rank_of_trajectory, minlength=num_ranks).tolist() == [8 // num_ranks] * num_ranks
    shares = [rank_part(some, found, rank) for rank in range(num_ranks)]
    np.testing.assert_allclose(found.seconds, [true_seconds(share, COST) for share in shares], rtol=1e-6)

    def slowest(shares):
        owners = np.empty(8, dtype=np.int64)
        for rank, share in enumerate(shares):
            owners[share] = rank
        placed = Placement(owners, found.seconds, 0.0)
        return max(true_seconds(rank_part(some, placed, rank), COST) for rank in range(num_ranks))

    assert found.seconds.max() <= 1.1 * min(map(slowest, equal_shares(list(range(8)), num_ranks)))


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 99), st.sampled_from([None, 40]))
def test_any_trees_make_ranks_of_as_many_trajectories(num_ranks, share, seed, max_tokens):
    rng = np.random.default_rng(seed)
    sizes = np.diff([0, *np.sort(rng.choice(num_ranks * share + 1, 2)), num_ranks * share])
    some = [samples(rng, int(rng.integers(1, 60)), rng.integers(1, 80, size)) for size in sizes if size]
    found = assign_ranks(some, num_ranks, COST, split="trajectories", max_tokens=max_tokens, in_equal_number=True)
    assert np.bincount(found.rank_of_trajectory, minlength=num_ranks).tolist() == [share] * num_ranks


def test_rollouts_of_one_size_stay_whole_on_ranks_of_as_many():
    rng = np.random.default_rng(0)
    some = [samples(rng, 40, rng.integers(5, 80, 4), rollouts=[0] * 4) for _ in range(12)]
    found = assign_ranks(some, 4, COST, in_equal_number=True)
    assert np.bincount(found.rank_of_trajectory).tolist() == [12] * 4
    assert all(len(set(ranks)) == 1 for ranks in found.rank_of_trajectory.reshape(12, 4).tolist())
    assert found.imbalance < 1.05


def test_trees_of_many_lengths_are_cut_for_even_ranks_of_as_many():
    rng = np.random.default_rng(0)
    some = [samples(rng, 20, rng.integers(5, 20 * (3 + number), 8)) for number in range(16)]
    whole, cut = (
        assign_ranks(some, 16, COST, split=split, in_equal_number=True) for split in ("never", "trajectories")
    )
    assert whole.imbalance > 1.5
    assert cut.imbalance < 1.02
    assert np.bincount(cut.rank_of_trajectory).tolist() == np.bincount(whole.rank_of_trajectory).tolist() == [8] * 16


def test_numbers_are_equal_however_short_the_search(monkeypatch):
    monkeypatch.setattr(search, "MAX_MOVES", 0)
    rng = np.random.default_rng(0)
    some = [samples(rng, 20, rng.integers(5, 90, size)) for size in (1, 9, 2, 3, 5, 4)]
    found = assign_ranks(some, 8, COST, split="trajectories", in_equal_number=True)
    assert np.bincount(found.rank_of_trajectory).tolist() == [3] * 8
