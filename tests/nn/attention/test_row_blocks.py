"""Blocks cover every visible pair exactly once, under any cost constants; and they are few."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plain_trees import image_rows, is_above
from treewise.nn.attention import mask as row_blocks
from treewise.nn.attention.mask import TreeMask
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing.strategies import forests_and_budgets, random_tree
from treewise.tree.forest import Forest

# What a call costs, the fewest rows that it is paid for, the most rows of a tile.
CONSTANTS = [(4096, 48, 256), (0, 1, 1), (0, 0, 256), (16, 4, 7), (10**9, 48, 256), (10**9, 0, 3), (64, 1000, 12)]

rules = st.tuples(st.none() | st.integers(1, 9), st.none() | st.integers(1, 9))


def visible(made, number, window, chunk, rng=None):
    """The mask of a micro-batch and, from the ancestor matrix, the pairs that it must cover ([T, K] bool).

    rng: images that attend both ways are put at random.
    """
    layout = lay_out(made, number)
    rows = [made.micro_batches[above].positions()[read] for above, read in layout.gateway]
    keys, forest = np.concatenate([*rows, layout.positions]), made.forest
    seen = is_above(forest.parent)[layout.positions][:, keys]
    before = np.zeros(layout.num_tokens, dtype=int) if rng is None else image_rows(layout.positions, forest.parent, rng)
    image = np.arange(layout.num_tokens) - before  # a text token is one of its own
    seen[:, -layout.num_tokens :] |= image[:, None] == image
    query_depth, key_depth = forest.depth[layout.positions][:, None], forest.depth[keys]
    if window is not None:
        seen &= query_depth - key_depth < window
    if chunk is not None:
        seen &= query_depth // chunk == key_depth // chunk
    return TreeMask.from_layout(layout, before), seen


def covered(found, shape):
    """How often blocks cover each pair, read from their definition."""
    times = np.zeros(shape, dtype=int)
    num_gateway = shape[1] - shape[0]
    assert [block.start for block in found] == [0, *[block.end for block in found[:-1]]]
    assert found[-1].end == shape[0]
    for block in found:
        rows = np.arange(block.start, block.end)
        for low, high in block.full:
            times[block.start : block.end, low:high] += 1
        keys = np.concatenate([np.arange(low, high) for low, high in block.rest])
        assert keys[-len(rows) :].tolist() == (rows + num_gateway).tolist()  # own rows last
        if block.tile is None:
            assert len(keys) == len(rows)
            tile = np.tri(len(rows), k=0 if block.is_causal else len(rows), dtype=bool)
        else:
            tile = block.tile
            assert tile.shape == (len(rows), len(keys))
        times[block.start : block.end, keys] += tile
    return times


def check(made, window, chunk, constants, rng=None):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("PAIRS_PER_CALL", "MIN_ROWS", "MAX_TILE_ROWS"), constants, strict=True):
            patch.setattr(row_blocks, name, value)
        patch.setattr(row_blocks, "MAX_JOINED_ROWS", constants[2])
        for number in range(made.num_micro_batches):
            mask, seen = visible(made, number, window, chunk, rng)
            found = row_blocks.plan_blocks(mask, window, chunk)
            np.testing.assert_array_equal(covered(found, seen.shape), seen)
            largest = max(constants[2], int((np.arange(mask.num_queries) - mask.lo[-mask.num_queries :]).max()) + 1)
            assert all(block.tile is None or block.end - block.start <= largest for block in found)


@pytest.mark.representatives("(4096, 48, 256)", "(0, 1, 1)", "(16, 4, 7)")
@pytest.mark.parametrize("constants", CONSTANTS, ids=str)
@given(forests_and_budgets(), rules)
def test_every_visible_pair_is_covered_once(constants, forest_and_budget, rule):
    forest, budget = forest_and_budget
    check(plan(forest, budget), *rule, constants)


@pytest.mark.representatives("None-None", "6-5")
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (5, None), (None, 4), (6, 5), (1, None), (None, 1)])
def test_large_random_trees_are_covered_once(window, chunk):
    rng = np.random.default_rng(0)
    for constants in CONSTANTS:
        trees = [random_tree(rng, int(rng.integers(1, 50)), 6) for _ in range(2)]
        num_tokens = sum(tree.num_tokens for tree in trees)
        made = plan(trees, int(rng.integers(1, num_tokens + 1)), hold="never")
        check(made, window, chunk, constants)
        check(made, window, chunk, constants, rng)


def blocks_of(forest, window=None, chunk=None):
    return row_blocks.plan_blocks(TreeMask.from_layout(lay_out(plan(forest), 0)), window, chunk)


def caterpillar(length):
    """A spine of single tokens; from each hangs one leaf."""
    parents = [-1, *range(length - 1), *range(length)]
    return Forest.from_nodes(parents, [[1, 1], *[[1]] * (2 * length - 1)], merge_siblings=False)


def test_a_path_is_one_causal_block():
    (block,) = blocks_of(Forest.from_nodes([-1], [[1] * 5000]))
    assert (block.start, block.end, block.full, block.rest, block.tile) == (0, 5000, (), ((0, 5000),), None)


def test_an_image_on_a_path_is_a_whole_square():
    forest = Forest.from_nodes([-1], [[1] * 1000])
    before = np.zeros(1000, dtype=int)
    before[300:700] = np.arange(400)
    text, image, more = row_blocks.plan_blocks(TreeMask.from_layout(lay_out(plan(forest), 0), before), None, None)
    assert [(each.start, each.end, each.is_causal) for each in (text, image, more)] == [
        (0, 300, True),
        (300, 700, False),
        (700, 1000, True),
    ]
    assert image.tile is None
    assert image.full == ((0, 300),)
    assert more.full == ((0, 700),)


def test_a_prompt_with_long_samples_has_one_block_a_sample_and_no_tile():
    forest = Forest.from_nodes([-1, 0, 0, 0], [[1] * 300, [2] * 1000, [3] * 900, [4] * 800])
    found = blocks_of(forest)
    assert [(block.start, block.end) for block in found] == [(0, 1300), (1300, 2200), (2200, 3000)]
    assert [block.full for block in found] == [(), ((0, 300),), ((0, 300),)]
    assert all(block.tile is None for block in found)


def test_a_caterpillar_needs_few_blocks():
    length = 2000
    found = blocks_of(caterpillar(length))
    assert len(found) <= 1 + 2 * -(-length // row_blocks.MAX_JOINED_ROWS)


@pytest.mark.parametrize("reach", [1, 4, 50, 2000])
def test_2_000_segments_of_8_tokens_need_few_blocks(reach):
    rng = np.random.default_rng(0)
    parents = [-1] + [int(rng.integers(max(0, node - reach), node)) for node in range(1, 2000)]
    forest = Forest.from_nodes(parents, [[1] * 8] * 2000, merge_siblings=False)
    assert len(blocks_of(forest)) <= 3 * -(-forest.num_tokens // row_blocks.MAX_JOINED_ROWS)


@pytest.mark.parametrize(("window", "chunk"), [(128, None), (None, 512)])
def test_a_path_under_a_window_is_cut_into_tiles(window, chunk):
    found = blocks_of(Forest.from_nodes([-1], [[1] * 5000]), window, chunk)
    assert len(found) <= 2 * -(-5000 // row_blocks.MAX_TILE_ROWS)
    num_keys = sum(high - low for block in found for low, high in (*block.full, *block.rest))
    assert num_keys <= 5000 * 2 + len(found) * (window or chunk)  # far fewer than the 12.5 million pairs would need
