"""The block mask against the exact mask, block by block; outputs and gradients against the reference."""

import itertools
import json
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as public
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from benchmarks import flex_kernels
from tests.plain_trees import image_rows
from treewise.errors import PlanError, UnsupportedModelError
from treewise.nn.attention import flex
from treewise.nn.attention.flex import block_mask, flex_attention_tree
from treewise.nn.attention.kernel_cases import DTYPES, HEAD_SIZES, with_gradients
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.reference import reference_attention, visible
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing.strategies import MAX_SEED, forests_and_budgets
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

CPU = torch.device("cpu")
BLOCKS = ROWS, COLUMNS = (8, 4)
H, HKV, D, DV = 4, 2, 16, 32

RULES = {
    "plain": LayerRule(scaling=0.2),
    "window": LayerRule(scaling=0.3, window=5),
    "chunk": LayerRule(scaling=0.2, chunk=6),
    "softcap": LayerRule(scaling=0.2, softcap=1.3),
    "all": LayerRule(scaling=0.3, window=9, chunk=7, softcap=0.9),
}


@st.composite
def masks(draw: st.DrawFn) -> TreeMask:
    """The mask of one micro-batch of a random plan: with gateway keys or without, of any length; with images that
    attend both ways or without."""
    forest, budget = draw(forests_and_budgets())
    parts = plan(forest, budget)
    layout = lay_out(parts, draw(st.integers(0, parts.num_micro_batches - 1)))
    rng = np.random.default_rng(draw(st.integers(0, MAX_SEED)))
    before = image_rows(layout.positions, forest.parent, rng) if draw(st.booleans()) else None
    return TreeMask.from_layout(layout, before)


def dense(blocks: BlockMask) -> tuple[torch.Tensor, torch.Tensor]:
    """[Q, J] bools: partial and full blocks."""
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_indices is not None
    partial = BlockMask.from_kv_blocks(blocks.kv_num_blocks, blocks.kv_indices).to_dense()
    full = BlockMask.from_kv_blocks(blocks.full_kv_num_blocks, blocks.full_kv_indices).to_dense()
    return partial[0, 0].bool(), full[0, 0].bool()


def exact_counts(mask: TreeMask, rule: LayerRule) -> torch.Tensor:
    """[Q, J]: visible pairs of each block, from the dense mask."""
    seen = visible(mask, rule.window, rule.chunk, CPU)
    missing = (
        0,
        max(2 * COLUMNS - mask.num_keys, -mask.num_keys % COLUMNS),
        0,
        max(2 * ROWS - mask.num_queries, -mask.num_queries % ROWS),
    )
    seen = torch.nn.functional.pad(seen, missing)
    return seen.view(seen.shape[0] // ROWS, ROWS, -1, COLUMNS).sum(dim=(1, 3))


# -- the block mask -------------------------------------------------------------------------------------------------


@given(mask=masks())
def test_blocks_of_a_tree_are_classified_exactly(mask):
    partial, full = dense(block_mask(mask, RULES["plain"], CPU, BLOCKS))
    counts = exact_counts(mask, RULES["plain"])
    assert torch.equal(full, counts == ROWS * COLUMNS)
    assert torch.equal(partial, (counts > 0) & (counts < ROWS * COLUMNS))


@pytest.mark.parametrize("name", ["window", "chunk", "all"])
@given(mask=masks())
def test_full_blocks_hide_nothing_and_no_visible_pair_is_left_out(mask, name):
    partial, full = dense(block_mask(mask, RULES[name], CPU, BLOCKS))
    counts = exact_counts(mask, RULES[name])
    assert not (partial & full).any()
    assert (counts[full] == ROWS * COLUMNS).all()
    assert (partial | full)[counts > 0].all()


@settings(max_examples=2 * settings().max_examples)
@given(mask=masks())
def test_block_mask_is_the_one_that_torch_makes_pair_by_pair(mask):
    ours = block_mask(mask, RULES["plain"], CPU, BLOCKS)
    theirs = create_block_mask(ours.mask_mod, None, None, *ours.seq_lengths, device="cpu", BLOCK_SIZE=BLOCKS)
    assert theirs.shape == ours.shape
    for name in flex.BLOCK_TENSORS:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert getattr(ours, name).is_contiguous()


def test_layers_with_one_window_and_chunk_share_a_block_mask():
    mask = TreeMask.from_layout(lay_out(plan(Forest.from_trajectories([Trajectory([1, 2, 3])])), 0))
    first = block_mask(mask, LayerRule(scaling=0.1), CPU)
    assert block_mask(mask, LayerRule(scaling=0.2, softcap=30.0), CPU) is first
    assert block_mask(mask, LayerRule(scaling=0.1, window=2), CPU) is not first


def test_most_blocks_of_a_long_prefix_are_full():
    shared = list(range(64))
    forest = Forest.from_trajectories([Trajectory([*shared, 100 + branch] + [0] * 31) for branch in range(3)])
    mask = TreeMask.from_layout(lay_out(plan(forest), 0))
    _, full = dense(block_mask(mask, RULES["plain"], CPU, (32, 32)))
    assert full[2:, :2].all()


# -- outputs and gradients --------------------------------------------------------------------------------------------


def draw_inputs(mask: TreeMask, has_sinks: bool, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    shapes = [(1, H, mask.num_queries, D), (1, HKV, mask.num_keys, D), (1, HKV, mask.num_keys, DV), (H,)]
    shapes = shapes if has_sinks else shapes[:3]
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.representatives("softcap-no_sinks", "all-sinks")
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no_sinks", "sinks"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(mask=masks())
def test_outputs_and_gradients_are_those_of_the_reference(mask, rule, has_sinks):
    inputs = draw_inputs(mask, has_sinks, torch.float64)
    cotangent = torch.randn(1, H, mask.num_queries, DV)
    expected = with_gradients(reference_attention, inputs, mask, rule, cotangent)
    found = with_gradients(partial(flex_attention_tree, blocks=BLOCKS), inputs, mask, rule, cotangent)
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours - wanted).abs().max() < 1e-12  # float64, values of order one


def test_heads_smaller_than_the_kernels_take():
    mask = TreeMask.from_layout(lay_out(plan(Forest.from_trajectories([Trajectory([1, 2, 3]), Trajectory([1, 4])])), 0))
    shapes = [(1, H, mask.num_queries, 8), (1, HKV, mask.num_keys, 8), (1, HKV, mask.num_keys, 6)]
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    cotangent = torch.randn(1, H, mask.num_queries, 6)
    expected = with_gradients(reference_attention, inputs, mask, RULES["plain"], cotangent)
    found = with_gradients(flex_attention_tree, inputs, mask, RULES["plain"], cotangent)
    for ours, wanted in zip(found, expected, strict=True):
        assert ours.shape == wanted.shape
        assert (ours - wanted).abs().max() < 1e-12


def test_bfloat16_in_bfloat16_out():
    mask = TreeMask.from_layout(lay_out(plan(Forest.from_trajectories([Trajectory([1, 2, 3])])), 0))
    query, key, value, sinks = draw_inputs(mask, True, torch.bfloat16)
    assert flex_attention_tree(query, key, value, mask, RULES["all"], sinks).dtype == torch.bfloat16


# -- compiled ---------------------------------------------------------------------------------------------------------


def branching_mask(num_branches: int, num_shared: int, num_own: int, budget: int | None = None, number: int = -1):
    """A prefix of `num_shared` tokens and its branches; with a budget, a micro-batch below a gateway."""
    rng = np.random.default_rng(num_branches * num_shared + num_own)
    shared = rng.integers(0, 1000, num_shared)
    branches = [Trajectory(np.concatenate([shared, rng.integers(0, 1000, num_own)])) for _ in range(num_branches)]
    parts = plan(Forest.from_trajectories(branches), budget, hold="never")
    return TreeMask.from_layout(lay_out(parts, range(parts.num_micro_batches)[number]))


@pytest.fixture
def graphs(monkeypatch) -> list[object]:
    """The graphs that are compiled, on the CPU."""
    made: list[object] = []
    compiled = torch.compile(flex._kernel, fullgraph=True, backend=lambda graph, _: made.append(graph) or graph.forward)
    monkeypatch.setattr(flex, "_compiled_kernel", lambda: compiled)
    monkeypatch.setattr(flex, "_uncompiled", flex._compiled)
    monkeypatch.setattr(flex, "card", lambda _: flex.Card((9, 0), 227 * 1024))
    return made


def agrees(mask: TreeMask, rule: LayerRule) -> bool:
    """With tensors that lie in memory as models and gateways have them."""

    def of_model(num_heads: int, num_tokens: int) -> torch.Tensor:
        return torch.randn(1, num_tokens, num_heads, D).transpose(1, 2)

    query, key, value = of_model(H, mask.num_queries), of_model(HKV, mask.num_queries), of_model(HKV, mask.num_queries)
    if mask.num_gateway_keys:
        key, value = (torch.cat([of_model(HKV, mask.num_gateway_keys), each], dim=2) for each in (key, value))
    inputs = [each.requires_grad_(torch.is_grad_enabled()) for each in (query, key, value)]
    found = flex_attention_tree(*inputs, mask, rule) - reference_attention(*inputs, mask, rule)
    return float(found.detach().abs().max()) < 1e-5


SHAPES = [(2, 150, 90), (3, 257, 64), (2, 128, 128), (5, 128, 128), (9, 300, 31), (2, 20, 9)]


def test_a_kernel_serves_all_lengths_and_strides(graphs, monkeypatch):
    """One without gradients, one with: whatever fits a block, fills it or exceeds it, below a gateway or not."""
    monkeypatch.setattr(public, "_validate_device", lambda *_: None)  # refuses a backward on a CPU
    masks = [branching_mask(*shape) for shape in SHAPES]
    masks += [branching_mask(*shape, budget=shape[1] + shape[2]) for shape in SHAPES]
    lengths = [(mask.num_queries, mask.num_keys) for mask in masks]
    assert any(queries % flex.BLOCK_SIZE == 0 == keys % flex.BLOCK_SIZE for queries, keys in lengths)
    assert any(queries <= flex.BLOCK_SIZE < keys for queries, keys in lengths)
    rule = LayerRule(0.3, window=64, softcap=30.0)
    for mask in masks:
        with torch.no_grad():
            assert agrees(mask, rule)
        assert agrees(mask, LayerRule(0.3, window=100, softcap=50.0))  # numbers are not compiled in
    assert len(graphs) == 2
    assert agrees(masks[-1], RULES["plain"])  # another kind
    assert len(graphs) == 3


# -- what a card can launch and address; the test of `kernel_cases` tries its cases there ------------------------------


ROOT = Path(__file__).parents[3]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "flex-kernels.json").read_text())["kernels"]
SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
CARDS = [
    flex.Card(capability, kib * 1024) for capability, kib in zip(flex.COMPILED_FOR, SHARED_KIB.values(), strict=True)
]


@pytest.mark.parametrize("card", CARDS, ids=SHARED_KIB)
def test_every_head_size_can_be_launched_with_the_tiles_chosen_for_a_card(card):
    """The tiles are those that were compiled for it (flex-kernels.json), and their kernels fit."""
    assert card.capability is not None
    name = f"sm_{card.capability[0]}{card.capability[1]}"
    rows = [each for each in RESULTS if each["gpu"] == name and each["tiles"] == "treewise"]
    cells = {(each["dtype"], tuple(each["head_sizes"]), each["kernel"]): each for each in rows}
    assert set(cells) == set(itertools.product(DTYPES, HEAD_SIZES, ("forward", "backward")))
    for (dtype, sizes, kernel), row in cells.items():
        assert 0 < row["shared_bytes"] <= card.shared_bytes, row
        assert row["blocks"] >= 1, row
        for option, wanted in flex.tiles(DTYPES[dtype], sizes, card).items():
            which, _, short = option.partition("_")
            if which == kernel[0] + "wd":
                assert row[{"num_stages": "stages"}.get(short, short)] == wanted, row


def test_tiles_of_one_card_are_not_taken_for_another():
    sm_100 = flex.Card((10, 0), 227 * 1024)
    assert flex.tiles(torch.bfloat16, (128, 128), sm_100)
    says = r"heads of {} in float32 need .* capability {} has {} for a block; use attention='reference'"
    for card, size in ((flex.Card((7, 5), 64 * 1024), 64), (flex.Card((8, 9), 99 * 1024), 512)):
        number = f"{card.capability[0]}.{card.capability[1]}"
        with pytest.raises(UnsupportedModelError, match=says.format(size, number, card.shared_bytes // 1024)):
            flex.tiles(torch.float32, (size, size), card)
    gfx10 = flex.Card(None, 64 * 1024)  # ROCm: its (10, x) are other chips
    assert flex.tiles(torch.bfloat16, (128, 128), gfx10) == {}


def test_a_torch_whose_lowering_nobody_read_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.15.0+cpu")
    lowering = ModuleType("lowering")
    lowering.flex_attention = dense
    with (
        pytest.raises(SystemExit, match=r"torch 2\.15\.0\+cpu: the lowering of FlexAttention was read for 2\.13"),
        flex_kernels._lowered_as_on_cuda(lowering),
    ):
        pass


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "says"),
    [
        (530_000, 530_000, r"micro-batch of 530,000 tokens .* set max_tokens to at most 524,159"),
        (1_000, 17_000_000, r"path of 17,000,000 keys .* at most 16,777,087 keys"),
    ],
)
def test_rows_that_no_kernel_can_address_are_refused(num_queries, num_keys, says):
    """Beyond 2^31 numbers from one base a kernel would read other rows, silently."""
    query = torch.empty(1, 32, num_queries, 128, device="meta", dtype=torch.bfloat16)
    key, value = (torch.empty(1, 8, num_keys, 128, device="meta", dtype=torch.bfloat16) for _ in range(2))
    mask = TreeMask.from_layout(lay_out(plan(Forest.from_trajectories([Trajectory([1, 2])])), 0))
    with pytest.raises(PlanError, match=says):
        flex_attention_tree(query, key, value, mask, RULES["plain"])
