"""FLOP counts against numbers worked out by hand."""

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from treewise.nn.flops import LayerReach, flat_head_rows, leaf_head_rows, tree_head_rows
from treewise.nn.model_flops import flop_model, flop_model_of_config
from treewise.planning.planner import plan
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

LLAMA = {
    "vocab_size": 50,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
}
# q 8x8, k 8x4, v 8x4, o 8x8, and three of 8x16, in 2 layers.
LLAMA_WEIGHTS = 2 * (64 + 32 + 32 + 64 + 3 * 128)
# 4 H D in 2 layers.
LLAMA_PAIR = 2 * 4 * 4 * 2


def forest() -> Forest:
    """Three trajectories of 5, 4 and 3 tokens on a tree of 6; the last is contained in the first two."""
    return Forest.from_trajectories(
        [
            Trajectory([1, 2, 3, 4, 5], loss_weights=[0, 0, 0, 1, 1]),
            Trajectory([1, 2, 3, 6], loss_weights=[0, 0, 0, 1]),
            Trajectory([1, 2, 3], loss_weights=[0, 0, 1]),
        ]
    )


def test_llama_shapes() -> None:
    flops = flop_model(LlamaForCausalLM(LlamaConfig(**LLAMA)))
    assert flops.linear == 2 * LLAMA_WEIGHTS
    assert flops.linear_backward == 4 * LLAMA_WEIGHTS
    assert flops.head == 2 * 50 * 8
    assert flops.head_backward == 4 * 50 * 8
    assert flops.pair_forward == ((LayerReach(), LLAMA_PAIR),)
    assert flops.gateway_values == 2 * (2 + 2) * 2


def test_flat_and_tree_flops_of_a_step() -> None:
    flops = flop_model(LlamaForCausalLM(LlamaConfig(**LLAMA)))
    tree = forest()
    token, row, pair = 6 * LLAMA_WEIGHTS, 6 * 50 * 8, 3.5 * LLAMA_PAIR
    assert flops.flat(tree) == 12 * token + 4 * row + (15 + 10 + 6) * pair
    assert flops.leaf(tree) == 9 * token + 5 * row + (15 + 10) * pair
    assert flops.tree(tree) == 6 * token + 3 * row + (15 + 4) * pair


def test_head_rows_count_forks_once_and_leaves_with_what_they_contain() -> None:
    tree = forest()
    assert flat_head_rows(tree) == 4
    assert tree_head_rows(tree) == 3  # tokens 2, 3 (whose row serves 4 and 6) and 4
    assert leaf_head_rows(tree) == 5  # token 3 is trained in both leaves
    assert tree.leaf_trajectories.tolist() == [0, 1]


def test_leaf_head_rows_match_a_walk_along_each_path() -> None:
    rng = np.random.default_rng(0)
    items = []
    for _ in range(40):
        ids = rng.integers(0, 2, rng.integers(2, 12))
        weights = rng.integers(0, 2, len(ids))
        weights[0], weights[-1] = 0, 1
        items.append(Trajectory(ids, loss_weights=weights))
    tree = Forest.from_trajectories(items)
    trained = tree.token_weights() > 0
    assert leaf_head_rows(tree) == sum(int(trained[tree.paths[index]].sum()) for index in tree.leaf_trajectories)


def test_config_alone_gives_the_same_costs() -> None:
    config = LlamaConfig(**LLAMA)
    assert flop_model_of_config(config) == flop_model(LlamaForCausalLM(config))


def test_tied_head_is_counted_as_head_and_not_as_linear() -> None:
    flops = flop_model(LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)))
    assert flops.linear == 2 * LLAMA_WEIGHTS
    assert flops.head == 2 * 50 * 8


def test_experts_count_by_the_share_that_a_token_visits() -> None:
    config = Qwen3MoeConfig(
        **LLAMA,
        moe_intermediate_size=4,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    flops = flop_model(Qwen3MoeForCausalLM(config))
    attention, router, expert = 64 + 32 + 32 + 64, 8 * 8, 3 * 8 * 4
    assert flops.linear == 2 * 2 * (attention + router + 2 * expert)


def test_frozen_weights_cost_no_weight_gradient() -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).requires_grad_(False)
    flops = flop_model(model)
    assert flops.linear_backward == flops.linear
    assert flops.head_backward == flops.head


def test_windows_bound_the_pairs() -> None:
    flops = flop_model_of_config(MistralConfig(**LLAMA, sliding_window=2))
    assert flops.pair_forward == ((LayerReach(window=2), LLAMA_PAIR),)


@pytest.mark.parametrize("reach", [LayerReach(), LayerReach(window=3), LayerReach(chunk=4)])
def test_pairs_of_a_reach_match_counting(reach: LayerReach) -> None:
    seen = [0]
    for depth in range(20):
        near = depth + 1
        if reach.window is not None:
            near = min(near, reach.window)
        if reach.chunk is not None:
            near = depth % reach.chunk + 1
        seen.append(seen[-1] + near)
    assert reach.pairs_below(np.arange(21)).tolist() == seen


def test_recomputed_tokens_add_one_forward() -> None:
    flops = flop_model(LlamaForCausalLM(LlamaConfig(**LLAMA)))
    cut = plan(forest(), max_tokens=3, hold="never")
    depths = np.sort(np.concatenate([cut.forest.depth[b.positions()] for b in cut.micro_batches if b.is_open]))
    expected = len(depths) * 2 * LLAMA_WEIGHTS + (depths + 1).sum() * LLAMA_PAIR
    assert len(depths) == 3
    assert flops.recomputed(cut) == expected
    assert flops.planned(cut) == flops.tree(cut.forest) + expected


def test_weights_on_the_meta_device_are_enough() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    assert flop_model(model).linear == 2 * LLAMA_WEIGHTS
