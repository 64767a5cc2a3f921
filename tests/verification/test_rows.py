"""Rows that are cut short keep their forks and a trained token each; small budgets have what they are for."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.image_models import IMAGE_TOKEN, png
from treewise.planning.planner import plan
from treewise.testing.strategies import trajectories
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory
from treewise.verification.rows import (
    MAX_MICRO_BATCHES,
    NUM_LEVELS,
    NUM_PIECES,
    PlanFacts,
    first_rows,
    of_trees,
    shortened,
    small_plans,
    trees_of,
)


def tree(seed: int, trunk: int, leaves: int, length: int) -> list[Trajectory]:
    """Leaves below a trunk, forking at its end and at its middle; the last third of each is trained."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 90, trunk)
    items = []
    for leaf in range(leaves):
        ids = np.concatenate(
            [shared[: trunk if leaf % 2 else trunk // 2], [90 + leaf % 7], rng.integers(0, 90, length)]
        )
        items.append(
            Trajectory(ids, np.arange(len(ids)) >= len(ids) - length // 3, advantages=rng.normal(size=len(ids)))
        )
    return items


@given(trajectories(), st.integers(1, 6))
def test_rows_cut_short_fork_where_they_did(items: list[Trajectory], num_tokens: int) -> None:
    items = [item for item in items if item.loss_weights[1:].any()]  # of a first token no weight counts
    assume(items)
    forest = Forest.from_trajectories(items)
    short = shortened(forest, num_tokens)
    assert short.num_trajectories == forest.num_trajectories
    assert short.num_trees == forest.num_trees
    assert short.num_tokens <= num_tokens * len(forest.segments.start) + forest.num_trajectories
    before, after = (sorted(Counter(trees_of(each)).values()) for each in (forest, short))
    assert before == after
    for item in short.trajectories:
        assert item.loss_weights[1:].any()


def test_streams_are_cut_with_their_tokens() -> None:
    items = tree(0, 20, 4, 12)
    short = shortened(Forest.from_trajectories(items), 3)
    for item, whole in zip(short.trajectories, items, strict=True):
        assert item.advantages is not None
        pairs = set(zip(whole.token_ids.tolist(), np.asarray(whole.advantages).tolist(), strict=True))
        assert set(zip(item.token_ids.tolist(), item.advantages.tolist(), strict=True)) <= pairs
        assert item.token_ids[-1] == whole.token_ids[-1]  # the last trained one
    assert len(small_first(short)) > 1


def small_first(forest: Forest) -> set[int]:
    """Tokens after which trajectories part."""
    return {int(item.token_ids[3]) for item in forest.trajectories}


def test_images_are_kept_whole_or_left_out() -> None:
    image = ImageSpan(png(1), 4, 8)
    ids = [5, 6, 7, 8, *[IMAGE_TOKEN] * 4, 9, 10, 11, 12]
    items = [Trajectory([*ids, 20 + leaf, 30, 31], images=(image,)) for leaf in range(2)]
    forest = Forest.from_trajectories(items)
    kept = shortened(forest, 2, with_images=True).trajectories[0]
    assert kept.token_ids.tolist() == [5, 6, *[IMAGE_TOKEN] * 4, 20, 30, 31]
    assert (kept.images[0].start, kept.images[0].end) == (2, 6)
    left = shortened(forest, 2).trajectories[0]
    assert left.token_ids.tolist() == [5, 6, 20, 30, 31]
    assert left.images == ()


def test_trees_that_stay_apart_do_so() -> None:
    items = tree(0, 10, 4, 6)
    apart = Forest.concatenate([Forest.from_trajectories(items[:2]), Forest.from_trajectories(items[2:])])
    assert shortened(apart, 4).num_trees == 2
    assert of_trees(apart, range(4)).num_tokens == apart.num_tokens
    assert Forest.from_trajectories(items).num_trees == 1


def test_a_small_budget_has_four_levels_a_gap_and_five_pieces() -> None:
    (small,) = small_plans(Forest.from_trajectories(tree(0, 40, 12, 30)))
    facts = PlanFacts.of(small)
    assert (facts.num_levels >= NUM_LEVELS, facts.has_gap, facts.num_pieces >= NUM_PIECES) == (True, True, True)
    assert small.num_micro_batches <= MAX_MICRO_BATCHES
    assert small.max_tokens is not None
    for less in range(1, small.max_tokens):  # it is the smallest
        tried = plan(small.forest, less)
        assert not all(PlanFacts.of(tried).score) or tried.num_micro_batches > MAX_MICRO_BATCHES


def test_what_one_budget_lacks_another_has() -> None:
    first, second = small_plans(Forest.from_trajectories(tree(0, 24, 2, 24)))
    assert PlanFacts.of(first).num_levels >= NUM_LEVELS
    assert PlanFacts.of(second).has_gap
    (chain,) = small_plans(Forest.from_trajectories([Trajectory(np.arange(40))]))
    assert not PlanFacts.of(chain).has_gap
    (least,) = small_plans(Forest.from_trajectories([Trajectory([1, 2])]))
    assert least.max_tokens == 1


def test_pairs_stay_together() -> None:
    items = [replace(item, group=index // 2) for index, item in enumerate(tree(0, 40, 60, 30))]
    for small in small_plans(Forest.from_trajectories(items), whole_groups=True):
        groups = [item.group for item in small.forest.trajectories]
        assert all(groups.count(group) == 2 for group in groups)
        assert len(groups) < 60


@pytest.mark.parametrize(
    ("limit", "sizes", "is_cut"),
    [
        (0, [5, 5, 5], False),
        (10_000, [5, 5, 5], False),
        (600, [5, 5, 1], False),
        (330, [4, 2], False),  # as many rows as there have to be
        (100, [4, 2], True),
    ],
)
def test_first_rows(limit: int, sizes: list[int], is_cut: bool) -> None:
    trees = [tree(seed, 30, 5, 30) for seed in range(3)]
    forest, found = first_rows(trees, limit)
    assert found == is_cut
    roots = trees_of(forest)
    assert [roots.count(root) for root in dict.fromkeys(roots)] == sizes
    assert forest.num_flat_tokens <= (limit or 10_000)
