"""The reference on a tree, whole or partitioned, equals plain causal attention of every trajectory on its own."""

import pytest
import torch
from hypothesis import given, settings

from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.reference import reference_attention, visible
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing.strategies import forests, forests_and_budgets
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

H, HKV, D, DV = 4, 2, 6, 5
TOLERANCE = 1e-12  # float64; values of order one, sums of at most a few hundred terms

RULES = {
    "plain": LayerRule(scaling=0.4),
    "window": LayerRule(scaling=0.4, window=3),
    "chunk": LayerRule(scaling=0.4, chunk=4),
    "softcap": LayerRule(scaling=0.4, softcap=1.3),
    "all": LayerRule(scaling=0.4, window=5, chunk=7, softcap=0.9),
}


def draw_inputs(num_tokens: int) -> list[torch.Tensor]:
    shapes = [(1, H, num_tokens, D), (1, HKV, num_tokens, D), (1, HKV, num_tokens, DV), (H,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def flat_attention(query, key, value, rule: LayerRule, sinks) -> torch.Tensor:
    """One trajectory alone: plain causal attention where positions are depths; [1, H, length, DV]."""
    key, value = (tensor.repeat_interleave(H // HKV, dim=1) for tensor in (key, value))
    q = torch.arange(query.shape[2])[:, None]
    k = q.T
    seen = k <= q
    if rule.window is not None:
        seen &= q - k < rule.window
    if rule.chunk is not None:
        seen &= q // rule.chunk == k // rule.chunk
    scores = rule.scaling * query @ key.mT
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = scores.exp() * seen
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[None, :, None, None]
    return weights @ value / total


def tree_attention(forest: Forest, budget: int, query, key, value, rule: LayerRule, sinks) -> torch.Tensor:
    """The reference over all micro-batches of a plan; [1, H, tree tokens, DV]."""
    parts = plan(forest, budget)
    out = query.new_zeros(1, H, forest.num_tokens, DV)
    for number in range(parts.num_micro_batches):
        layout = lay_out(parts, number)
        above = [parts.micro_batches[index].positions()[read] for index, read in layout.gateway]
        rows = torch.as_tensor(layout.positions)
        keys = torch.cat([torch.as_tensor(positions) for positions in [*above, layout.positions]])
        mask = TreeMask.from_layout(layout)
        part = reference_attention(query[:, :, rows], key[:, :, keys], value[:, :, keys], mask, rule, sinks)
        out = out.index_copy(2, rows, part)
    return out


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no_sinks", "sinks"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@settings(max_examples=settings().max_examples // 2)
@given(forest_and_budget=forests_and_budgets())
def test_outputs_and_gradients_are_those_of_flat_attention(forest_and_budget, rule, has_sinks):
    forest, budget = forest_and_budget
    *tensors, sinks = draw_inputs(forest.num_tokens)
    used = [*tensors, sinks] if has_sinks else tensors
    tree = tree_attention(forest, budget, *tensors, rule, sinks if has_sinks else None)
    tree = torch.cat([tree[:, :, path] for path in forest.paths], dim=2)
    paths = [[tensor[:, :, path] for tensor in tensors] for path in forest.paths]
    flat = torch.cat([flat_attention(*path, rule, sinks if has_sinks else None) for path in paths], dim=2)
    assert (tree - flat).abs().max() < TOLERANCE
    cotangent = torch.randn_like(flat)
    expected = torch.autograd.grad(flat, used, cotangent)
    for found, wanted in zip(torch.autograd.grad(tree, used, cotangent), expected, strict=True):
        assert (found - wanted).abs().max() < TOLERANCE


@given(forest=forests())
def test_a_query_sees_its_path_and_itself(forest):
    mask = TreeMask.from_layout(lay_out(plan(forest), 0))
    seen = visible(mask, None, None, torch.device("cpu"))
    assert seen.sum() == forest.num_tree_pairs
    for path in forest.paths:
        assert seen[path[-1]].nonzero().flatten().tolist() == path.tolist()


def test_bfloat16_accumulates_scores_in_float32():
    forest = Forest.from_trajectories([Trajectory([1, 2, 3]), Trajectory([1, 2, 4])])
    query, key, value, _ = (tensor.detach().bfloat16() for tensor in draw_inputs(forest.num_tokens))
    mask = TreeMask.from_layout(lay_out(plan(forest), 0))
    out = reference_attention(query, key, value, mask, RULES["plain"])
    exact = reference_attention(query.double(), key.double(), value.double(), mask, RULES["plain"])
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() < 4 * torch.finfo(torch.bfloat16).eps * value.abs().max()
