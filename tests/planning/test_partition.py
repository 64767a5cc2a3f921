"""Open and closed tokens, pieces and trunks, against subtree sizes counted token by token."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.image_models import png
from tests.plain_trees import is_above
from treewise.planning.partition import partition
from treewise.planning.planner import plan
from treewise.testing.strategies import forests_and_budgets
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

HOLDS = ("auto", "never", "always")
# At a budget of 8 the trunk fills a micro-batch, and three open branches are left below it.
FULL_TRUNK = Forest.from_trajectories(
    [Trajectory([1, 2, 3, 4, 5, 6, 7, 8, branch, 9, *[leaf] * 4]) for branch in (10, 11, 12) for leaf in (13, 14)]
)


def subtree_sizes(forest):
    return is_above(forest.parent).sum(axis=0)


def tokens_of(trunk):
    return [token for start, end in trunk.ranges for token in range(start, end)]


@given(forests_and_budgets(), st.sampled_from(HOLDS))
def test_pieces_are_the_largest_subtrees_that_fit(forest_and_budget, hold):
    forest, budget = forest_and_budget
    parts, size = partition(forest, budget, hold), subtree_sizes(forest)
    above = np.where(forest.parent < 0, budget + 1, size[forest.parent])
    roots = np.flatnonzero((size <= budget) & (above > budget))
    assert parts.piece_start.tolist() == roots.tolist()
    assert parts.piece_size.tolist() == size[roots].tolist()


@example((FULL_TRUNK, 8), "never")
@given(forests_and_budgets(), st.sampled_from(HOLDS))
def test_trunks_hold_each_open_token_once(forest_and_budget, hold):
    forest, budget = forest_and_budget
    trunks, size = partition(forest, budget, hold).trunks, subtree_sizes(forest)
    tokens = [token for trunk in trunks for token in tokens_of(trunk)]
    assert sorted(tokens) == np.flatnonzero(size > budget).tolist()
    for trunk in trunks:
        assert 1 <= trunk.num_tokens == len(tokens_of(trunk)) <= budget
        assert trunk.ranges == sorted(trunk.ranges)
        assert all(end < start for (_, end), (start, _) in zip(trunk.ranges, trunk.ranges[1:], strict=False))


@given(forests_and_budgets(), st.sampled_from(HOLDS))
def test_every_trunk_and_piece_hangs_off_one_trunk(forest_and_budget, hold):
    forest, budget = forest_and_budget
    parts = partition(forest, budget, hold)
    owner = {token: number for number, trunk in enumerate(parts.trunks) for token in tokens_of(trunk)}
    for number, trunk in enumerate(parts.trunks):
        assert trunk.parent < number
        before = {owner.get(int(forest.parent[token]), -1) for token in tokens_of(trunk)}
        assert before - {number} <= {trunk.parent}
    assert parts.piece_trunk.tolist() == [owner.get(int(forest.parent[start]), -1) for start in parts.piece_start]


@given(forests_and_budgets(), st.sampled_from(HOLDS))
def test_what_runs_below_a_held_trunk_fits_beside_it(forest_and_budget, hold):
    forest, budget = forest_and_budget
    parts = partition(forest, budget, hold)
    for number, trunk in enumerate(parts.trunks):
        below = parts.piece_size[parts.piece_trunk == number]
        if trunk.is_held:
            assert hold != "never"
            assert trunk.room == budget - trunk.num_tokens
            assert 0 < below.max() <= trunk.room
            assert all(other.parent != number for other in parts.trunks)
        else:
            assert trunk.room == budget


def star(prompt, samples, length):
    return Forest.from_trajectories(
        [Trajectory([*range(1, prompt + 1), 1000 + number, *range(length - 1)]) for number in range(samples)]
    )


@pytest.mark.parametrize(
    ("prompt", "samples", "length", "budget", "is_held"),
    [
        (200, 16, 100, 1024, True),  # a short shared prompt over many samples
        (400, 16, 300, 1024, True),  # nine micro-batches held, eight otherwise: less than 400 tokens cost
        (800, 20, 200, 1024, False),  # a long trunk: beside it one sample would fit at a time
        (100, 8, 1000, 1024, False),  # no sample fits beside the prompt
    ],
)
def test_hold_auto_weighs_room_against_recomputation(prompt, samples, length, budget, is_held):
    (trunk,) = partition(star(prompt, samples, length), budget, "auto").trunks
    assert trunk.num_tokens == prompt
    assert trunk.is_held is is_held


def test_hold_always_holds_wherever_the_pieces_fit():
    assert partition(star(600, 4, 300), 1024, "always").trunks[0].is_held
    assert not partition(star(100, 8, 1000), 1024, "always").trunks[0].is_held


@pytest.mark.parametrize("hold", HOLDS)
def test_no_image_is_cut(hold):
    """Images of 3 and 4 tokens on the trunk and on every branch, at every budget that holds one."""
    items = []
    for branch in range(3):
        ids = np.array([1, 2, 60, 60, 60, 3, 60, 60, 60, 60, 4, 5, 10 + branch, 6, 60, 60, 60, 60, 7, 8, 9 + branch])
        spans = [ImageSpan(png(number), *span) for number, span in enumerate([(2, 5), (6, 10), (14, 18)])]
        items += [Trajectory(np.append(ids, leaf), images=tuple(spans)) for leaf in (30, 31)]
    forest = Forest.from_trajectories(items)
    assert len(forest.images) == 5
    for budget in range(4, forest.num_tokens + 1):
        owner = np.full(forest.num_tokens, -1)
        for number, batch in enumerate(plan(forest, budget, hold=hold).micro_batches):
            assert batch.num_tokens <= budget
            assert (owner[batch.positions()] == -1).all()
            owner[batch.positions()] = number
        assert (owner >= 0).all()
        for start, end in zip(forest.images.start, forest.images.end, strict=True):
            assert len(set(owner[start:end])) == 1, (budget, start)
