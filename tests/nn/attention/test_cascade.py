"""The cascade equals the reference: outputs and every gradient, whole and partitioned, within rounding.

In float64 the tolerance is a multiple of its rounding unit. In float32 and bfloat16 the judge is a float64 oracle: the
cascade may be off by twice what the reference in that dtype is off by, plus one rounding of the result.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.plain_trees import image_rows
from treewise.errors import ConfigError
from treewise.nn.attention import mask as row_blocks
from treewise.nn.attention import softcap
from treewise.nn.attention.cascade import attend, kernel_takes_groups
from treewise.nn.attention.gateway import Gateway, GatewayRead
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.reference import reference_attention
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing.strategies import forests_and_budgets, random_tree
from treewise.tree.forest import Forest

LAYER, SCALING = 3, 0.37
RULES = {
    "plain": LayerRule(SCALING),
    "window": LayerRule(SCALING, window=4),
    "chunk": LayerRule(SCALING, chunk=5),
    "both": LayerRule(SCALING, window=6, chunk=4),
    "cap": LayerRule(SCALING, softcap=0.8),
    "cap and window": LayerRule(SCALING, window=4, softcap=0.8),
}
HEADS = [(2, 2, 8, 8), (4, 2, 8, 8), (3, 1, 8, 8), (2, 2, 8, 5), (4, 2, 6, 16)]  # H, Hkv, D, D of the values
# Small constants, so that small trees give full rectangles, tiles with gaps and causal squares; of blocks, and of
# capped tiles.
CONSTANTS = [(4096, 48, 256, 256, 1024), (0, 1, 16, 4, 3), (24, 4, 9, 1, 1)]
NAMES = ("output", "query", "key", "value", "sinks")


def draw_inputs(forest, heads, dtype, seed):
    """Query, key, value and the gradient of the output for all tree tokens, and sinks; rounded to `dtype`."""
    num_heads, num_key_heads, width, value_width = heads
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_heads, width), (num_key_heads, width), (num_key_heads, value_width), (num_heads, value_width)]
    made = [torch.randn(1, h, forest.num_tokens, d, generator=generator, dtype=torch.float64) for h, d in shapes]
    return [tensor.to(dtype) for tensor in (*made, torch.randn(num_heads, generator=generator, dtype=torch.float64))]


def mask_of(made, number, seed=None):
    """seed: of images that attend both ways; None: none."""
    layout = lay_out(made, number)
    rng = np.random.default_rng([seed or 0, number])
    before = None if seed is None else image_rows(layout.positions, made.forest.parent, rng)
    return TreeMask.from_layout(layout, before)


def by_reference(made, inputs, rule, *, with_sinks=True, image_seed=None):
    """Micro-batch by micro-batch, gathering keys with autograd: output and gradients of all tree tokens."""
    *tensors, out_grad, sinks = [tensor.clone() for tensor in inputs]
    query, key, value, sinks = leaves = [tensor.requires_grad_() for tensor in (*tensors, sinks)]
    out = torch.zeros_like(out_grad)
    for number in range(made.num_micro_batches):
        layout = lay_out(made, number)
        read = [made.micro_batches[above].positions()[rows] for above, rows in layout.gateway]
        own, keys = torch.from_numpy(layout.positions), torch.from_numpy(np.concatenate([*read, layout.positions]))
        part = reference_attention(
            query[:, :, own],
            key[:, :, keys],
            value[:, :, keys],
            mask_of(made, number, image_seed),
            rule,
            sinks if with_sinks else None,
        )
        torch.autograd.backward(part, out_grad[:, :, own])
        out[:, :, own] = part.detach()
    return dict(zip(NAMES, (out, *(leaf.grad for leaf in leaves)), strict=True))


def by_cascade(made, inputs, rule, *, with_sinks=True, rows_as="slice", image_seed=None):
    """Each micro-batch through the cascade with gateways; gateway gradients are added where their tokens are."""
    query, key, value, out_grad, sinks = inputs
    positions = [torch.from_numpy(batch.positions()) for batch in made.micro_batches]
    wide = torch.promote_types(query.dtype, torch.float32)
    found = {name: torch.zeros_like(tensor) for name, tensor in zip(NAMES, (out_grad, *inputs[:3], sinks), strict=True)}
    found["key"], found["value"], found["sinks"] = key.to(wide) * 0, value.to(wide) * 0, sinks.to(wide) * 0
    gateways = [Gateway() for _ in positions]
    for gateway, own in zip(gateways, positions, strict=True):
        gateway.write(LAYER, key[:, :, own], value[:, :, own])
    for number, own in enumerate(positions):
        layout = lay_out(made, number)
        reads = tuple(GatewayRead(gateways[above], rows_of(rows, rows_as), len(rows)) for above, rows in layout.gateway)
        leaves = [tensor[:, :, own].clone().requires_grad_() for tensor in (query, key, value)]
        own_sinks = sinks.clone().requires_grad_()
        mask = mask_of(made, number, image_seed)
        out = attend(*leaves, mask, rule, own_sinks if with_sinks else None, reads, LAYER)
        torch.autograd.backward(out, out_grad[:, :, own])
        found["output"][:, :, own] = out.detach()
        found["query"][:, :, own] = leaves[0].grad
        found["key"][:, :, own] += leaves[1].grad
        found["value"][:, :, own] += leaves[2].grad
        found["sinks"] = found["sinks"] + own_sinks.grad.to(wide) if with_sinks else None
    for gateway, own in zip(gateways, positions, strict=True):
        if LAYER in gateway.key_grads:
            assert gateway.key_grads[LAYER].dtype == gateway.value_grads[LAYER].dtype == wide
            found["key"][:, :, own] += gateway.key_grads[LAYER]
            found["value"][:, :, own] += gateway.value_grads[LAYER]
    return found


def rows_of(rows, rows_as):
    is_contiguous = len(rows) == rows[-1] - rows[0] + 1
    if rows_as == "slice" and is_contiguous:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)


def check_float64(made, heads, rule, with_sinks, rows_as, seed):
    inputs = draw_inputs(made.forest, heads, torch.float64, seed)
    image_seed = seed if seed % 2 else None
    expected = by_reference(made, inputs, rule, with_sinks=with_sinks, image_seed=image_seed)
    found = by_cascade(made, inputs, rule, with_sinks=with_sinks, rows_as=rows_as, image_seed=image_seed)
    # Sums of at most a few hundred terms of order one, in another order.
    unit = torch.finfo(torch.float64).eps
    for name in NAMES if with_sinks else NAMES[:-1]:
        scale = max(1.0, float(expected[name].abs().max()))
        error = float((found[name] - expected[name]).abs().max())
        assert error <= 256 * unit * scale, (name, error)


@pytest.fixture(params=CONSTANTS, ids=str)
def _block_constants(request, monkeypatch):
    *of_blocks, rows, keys = request.param
    for name, value in zip(("PAIRS_PER_CALL", "MIN_ROWS", "MAX_TILE_ROWS"), of_blocks, strict=True):
        monkeypatch.setattr(row_blocks, name, value)
    monkeypatch.setattr(row_blocks, "MAX_JOINED_ROWS", of_blocks[2])
    monkeypatch.setattr(softcap, "TILE_ROWS", rows)
    monkeypatch.setattr(softcap, "TILE_KEYS", keys)


@pytest.mark.representatives("(4096, 48, 256, 256, 1024)-both", "(24, 4, 9, 1, 1)-chunk", "(0, 1, 16, 4, 3)-cap")
@pytest.mark.usefixtures("_block_constants")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(
    forests_and_budgets(),
    st.sampled_from(HEADS),
    st.booleans(),
    st.sampled_from(["slice", "tensor"]),
    st.integers(0, 99),
)
def test_float64_output_and_gradients_are_the_references(rule, forest_and_budget, heads, with_sinks, rows_as, seed):
    forest, budget = forest_and_budget
    check_float64(plan(forest, budget), heads, rule, with_sinks, rows_as, seed)


@pytest.mark.representatives(
    "whole-plain", "two fifths-both", "two fifths-chunk", "a tenth-window", "a tenth-cap", "a tenth-cap and window"
)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("share", [1, 0.4, 0.1], ids=["whole", "two fifths", "a tenth"])
def test_float64_on_large_trees(rule, share):
    rng = np.random.default_rng(0)
    for heads in HEADS[:3]:
        forest = random_tree(rng, 12, 120)
        check_float64(plan(forest, max(1, int(share * forest.num_tokens))), heads, rule, True, "slice", 0)


def error_of(found, oracle):
    return float((found.double() - oracle).norm())


@pytest.mark.representatives(
    "(4, 2, 8, 8)-whole-plain-bfloat16",
    "(4, 2, 8, 8)-whole-cap and window-float32",
    "(4, 2, 8, 8)-partitioned-both-bfloat16",
    "(4, 2, 8, 8)-partitioned-chunk-float32",
    "(4, 2, 8, 8)-partitioned-cap-bfloat16",
    "(4, 2, 6, 16)-whole-window-bfloat16",
    "(4, 2, 6, 16)-whole-cap-bfloat16",
    "(4, 2, 6, 16)-partitioned-plain-bfloat16",
    "(4, 2, 6, 16)-partitioned-cap and window-float32",
    "(2, 2, 8, 5)-partitioned-plain-float32",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("share", [1, 0.3], ids=["whole", "partitioned"])
@pytest.mark.parametrize("heads", [HEADS[1], HEADS[3], HEADS[4]], ids=str)
def test_low_precision_is_within_twice_the_references_own_error(dtype, rule, share, heads):
    rng = np.random.default_rng(1)
    for seed in range(3):
        forest = random_tree(rng, 20, 40)
        made = plan(forest, max(1, int(share * forest.num_tokens)))
        inputs = draw_inputs(forest, heads, dtype, seed)
        oracle = by_reference(plan(forest), [tensor.double() for tensor in inputs], rule)
        reference = by_reference(plan(forest), inputs, rule)
        found = by_cascade(made, inputs, rule)
        for name in NAMES:
            # One rounding of every value; the gradient of a sink is a sum over all rows, each term rounded.
            num_roundings = forest.num_tokens**0.5 if name == "sinks" else 1
            rounding = num_roundings * torch.finfo(dtype).eps * float(oracle[name].norm())
            budget = 2 * (error_of(reference[name], oracle[name]) + rounding)
            assert error_of(found[name], oracle[name]) <= budget, name


def test_keys_read_by_many_blocks_are_accumulated_in_float32(monkeypatch):
    """A prompt under hundreds of branches: their bfloat16 gradients must not be added up in bfloat16."""
    monkeypatch.setattr(row_blocks, "MAX_JOINED_ROWS", 1)  # a block for every branch
    forest = Forest.from_nodes([-1, *[0] * 300], [[1] * 4, *[[2] * 4] * 300], merge_siblings=False)
    inputs = draw_inputs(forest, (2, 1, 8, 8), torch.bfloat16, 0)
    inputs[3] = inputs[3].abs()  # one sign, so that the gradients of shared values only grow
    wide = [tensor.double() for tensor in inputs]
    oracle = by_reference(plan(forest), wide, RULES["plain"], with_sinks=False)["value"]
    found = by_cascade(plan(forest), inputs, RULES["plain"], with_sinks=False)["value"]
    error = (found.double() - oracle)[:, :, :4].abs() / oracle[:, :, :4].abs()
    assert error.max() <= torch.finfo(torch.bfloat16).eps


def test_a_micro_batch_runs_the_same_twice():
    forest = random_tree(np.random.default_rng(2), 40, 20)
    inputs = draw_inputs(forest, HEADS[1], torch.float32, 0)
    made = plan(forest, forest.num_tokens // 2)
    one, two = (by_cascade(made, inputs, RULES["plain"]) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in NAMES)


def test_nothing_is_saved_but_inputs_output_and_log_sum_exp():
    forest = random_tree(np.random.default_rng(3), 40, 20)
    query, key, value, _, _ = draw_inputs(forest, HEADS[1], torch.float32, 0)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        attend(*leaves, TreeMask.from_layout(lay_out(plan(forest), 0)), RULES["plain"])
    num_heads, width = query.shape[1], query.shape[3]
    rows = [num_heads * width, 2 * key.shape[1] * width, num_heads * width, num_heads]
    assert sum(tensor.numel() for tensor in saved) == forest.num_tokens * sum(rows)


def test_this_torch_takes_grouped_heads():
    assert kernel_takes_groups()


def test_without_grouped_heads_the_error_names_the_way_out(monkeypatch):
    monkeypatch.setattr("treewise.nn.attention.cascade.kernel_takes_groups", lambda: False)
    forest = Forest.from_nodes([-1], [[1, 2, 3]])
    query, key, value, _, _ = draw_inputs(forest, HEADS[1], torch.float32, 0)
    with pytest.raises(ConfigError, match="attention='reference'"):
        attend(query, key, value, TreeMask.from_layout(lay_out(plan(forest), 0)), RULES["plain"])
