"""Placements of trees with images: a rank runs the tower once for each distinct image of its trajectories."""

import itertools

import numpy as np
import pytest

from treewise import Trajectory
from treewise.distributed.placement import CostModel, Placement, assign_ranks, rank_part
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan

COST = CostModel(seconds_per_token=1.0, seconds_per_pair=0.01, seconds_per_micro_batch=0.0)
ROWS = 2  # tokens of an image


def call(*parts: int | str) -> Trajectory:
    """Runs of text by number, and images by name."""
    ids: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, str):
            spans.append(ImageSpan(part.encode(), len(ids), len(ids) + ROWS))
            ids += [63] * ROWS
        else:
            ids += np.random.default_rng(part).integers(0, 50, 4).tolist()
    return Trajectory(ids, images=tuple(spans))


def tokens_of(forest: Forest) -> np.ndarray:
    """Cost of each place: by the first letter of the image's name."""
    cost = {"a": 40.0, "b": 25.0, "c": 60.0}
    own = np.array([cost[bytes(each.source).decode()[0]] for each in forest.images.sources])
    return own[forest.images.index] if len(own) else own


def true_seconds(forests: list[Forest], rank_N: np.ndarray, num_ranks: int) -> np.ndarray:
    """Of each rank: tokens, pairs, and each distinct image of all its trees once."""
    seconds = []
    for rank in range(num_ranks):
        part = rank_part(forests, Placement(rank_N, np.zeros(num_ranks), 0.0), rank)
        images = {}
        for tree in part:
            images |= {each.digest: cost for each, cost in zip(_sources(tree), tokens_of(tree), strict=True)}
        text = sum(tree.num_tokens + COST.seconds_per_pair * tree.num_tree_pairs for tree in part)
        seconds.append(text + sum(images.values()))
    return np.array(seconds)


def _sources(tree: Forest) -> list[ImageSpan]:
    return [tree.images.sources[index] for index in tree.images.index.tolist()]


def forest_of(*calls: Trajectory) -> Forest:
    return Forest.from_trajectories(list(calls))


# A window of one picture: the same picture at several places, within a tree and in two of them.
WINDOWS = [
    forest_of(call(1, "a1", 2), call(1, 3, "a2", 4), call(1, 3, 5, "a1", 6), call(1, "a1", 7, "b1", 8)),
    forest_of(call(11, "b1", 12), call(11, "a1", 13), call(11, 14)),
]


@pytest.mark.representatives("1-1000", "2-None")
@pytest.mark.parametrize("max_tokens", [None, 1000])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_predicted_seconds_count_each_image_of_a_rank_once(num_ranks: int, max_tokens: int | None) -> None:
    costs = [tokens_of(forest) for forest in WINDOWS]
    found = assign_ranks(WINDOWS, num_ranks, COST, max_tokens=max_tokens, image_tokens=costs)
    np.testing.assert_allclose(found.seconds, true_seconds(WINDOWS, found.rank_of_trajectory, num_ranks), rtol=1e-9)
    every = itertools.product(range(num_ranks), repeat=len(found.rank_of_trajectory))
    best = min(true_seconds(WINDOWS, np.array(each), num_ranks).max() for each in every)
    assert found.bound_seconds <= best * (1 + 1e-9)
    assert found.seconds.max() <= 1.15 * best


def test_a_tree_with_many_images_is_alone() -> None:
    heavy = forest_of(call(1, "c1", 2, "c2", 3), call(1, "c1", 4, "c3", 5))
    light = [forest_of(call(seed, seed + 1, seed + 2, seed + 3)) for seed in range(20, 60, 4)]
    trees = [heavy, *light]
    blind = assign_ranks(trees, 2, COST, split="never")
    placed = assign_ranks(trees, 2, COST, split="never", image_tokens=[tokens_of(tree) for tree in trees])
    with_heavy = placed.rank_of_trajectory == placed.rank_of_trajectory[0]
    assert with_heavy.sum() == 2
    assert (blind.rank_of_trajectory == blind.rank_of_trajectory[0]).sum() > 4
    seconds = [true_seconds(trees, each.rank_of_trajectory, 2).max() for each in (placed, blind)]
    assert seconds[0] < seconds[1]
    assert placed.seconds.max() == pytest.approx(placed.bound_seconds, rel=0.1)
