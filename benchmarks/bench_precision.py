"""Gradients of bfloat16 training against float32: how far flat training strays, and how far the tree does.

What rounding does to a gradient depends on the order of operations, so flat training is measured in three forms: each
trajectory alone with SDPA, the same with the model's eager attention, and one padded batch. Deviation: norm of the
difference of the whole gradient from the float32 flat one, over that one's norm. Three models: the first layers of
SmolLM2-135M, and Llama and Qwen3 shapes with random weights, whose tokens are SmolLM2's modulo their vocabulary.

    python benchmarks/bench_precision.py [--trees 8] [--trajectories 3] [--max_length 256]
"""

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, log
from typing import Any

import numpy as np
import torch
from common import bundled_trees, save, smollm2
from transformers import AutoConfig, AutoModelForCausalLM

from treewise.engine.engine import TreeEngine
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

Gradients = dict[str, torch.Tensor]
NUM_SMOLLM2_LAYERS = 8
VOCABULARY = 4_096  # of the models with random weights
NAMES = ("model", "tree", "tree_tokens", "flat_tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", type=int, default=8)
    parser.add_argument("--trajectories", type=int, default=3, help="of each tree")
    parser.add_argument("--max_length", type=int, default=256, help="of a trajectory, in tokens")
    args = parser.parse_args()
    demo, tokenizer = smollm2(torch.float32)
    trees = chosen(bundled_trees(tokenizer), args.trees, args.trajectories, args.max_length)
    print(len(trees), "trees", flush=True)
    rows: list[dict[str, Any]] = []
    for name, exact_model in models(demo):
        model = copy.deepcopy(exact_model).to(torch.bfloat16)
        exact_model.load_state_dict(model.state_dict())  # the same weights: those that bfloat16 holds
        of_model = []
        for tree, items in trees:
            row = measured(
                model, exact_model, [within(item, len(model.get_input_embeddings().weight)) for item in items]
            )
            of_model.append({"model": name, "tree": tree, **row})
            print(of_model[-1], flush=True)
        rows += [*of_model, means(name, of_model)]
        print(rows[-1], flush=True)
    each = [row for row in rows if row["tree"] != "geometric mean"]
    print("written to", save("precision", [*rows, means("all", each)]))


def models(demo: Any) -> Iterator[tuple[str, Any]]:
    """Names and models in float32, in training mode."""
    demo.model.layers = demo.model.layers[:NUM_SMOLLM2_LAYERS]
    demo.config.num_hidden_layers = NUM_SMOLLM2_LAYERS
    yield f"SmolLM2-135M, {NUM_SMOLLM2_LAYERS} layers", demo
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    for kind in ("llama", "qwen3"):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **sizes, **heads, initializer_range=0.05, pad_token_id=None)
        yield f"{kind}, random", AutoModelForCausalLM.from_config(config).train()


def within(item: Trajectory, vocabulary: int) -> Trajectory:
    """The trajectory with tokens of a smaller vocabulary."""
    return replace(item, token_ids=item.token_ids % vocabulary)


def measured(model: Any, exact_model: Any, items: Sequence[Trajectory]) -> dict[str, Any]:
    """Counts of tokens and the deviation of every contestant on one tree."""
    exact, forest = flat(exact_model, items), Forest.from_trajectories(items)
    found = {key: round(deviation(each, exact), 5) for key, each in contestants(model, forest, items)}
    return {"tree_tokens": forest.num_tokens, "flat_tokens": forest.num_flat_tokens, **found}


def means(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over trees."""
    keys = [key for key in rows[0] if key not in NAMES]
    found = {key: round(exp(sum(log(row[key]) for row in rows) / len(rows)), 5) for key in keys}
    return {"model": name, "tree": "geometric mean", **found}


def chosen(
    trees: dict[str, list[Trajectory]], num_trees: int, num_trajectories: int, max_length: int
) -> list[tuple[str, list[Trajectory]]]:
    """Some trajectories of some trees, spread evenly over each tree, each cut off at `max_length`."""
    found = []
    for name, items in trees.items():
        short = list({cut(item, max_length).token_ids.tobytes(): cut(item, max_length) for item in items}.values())
        if len(short) >= num_trajectories:
            places = np.linspace(0, len(short) - 1, num_trajectories).astype(int)
            found.append((name, [short[place] for place in places]))
    step = max(1, len(found) // num_trees)
    return found[::step][:num_trees]


def cut(item: Trajectory, length: int) -> Trajectory:
    """The first tokens of a trajectory, all trained, so that none is left without a loss."""
    return Trajectory(item.token_ids[:length])


def contestants(model: Any, forest: Forest, items: Sequence[Trajectory]) -> Any:
    """Names and gradients, one after the other."""
    model.set_attn_implementation("sdpa")
    yield "flat", flat(model, items)
    yield "flat_padded_batch", flat_batch(model, items)
    model.set_attn_implementation("eager")
    yield "flat_eager", flat(model, items)
    model.set_attn_implementation("sdpa")
    for key, max_tokens in (("tree_whole", None), ("tree_third", forest.num_tokens // 3)):
        model.zero_grad()
        TreeEngine(model, max_tokens, check=False).step(forest)
        yield key, gradients(model)


def flat(model: Any, items: Sequence[Trajectory]) -> Gradients:
    """Each trajectory alone."""
    model.zero_grad()
    total = sum(float(item.loss_weights.sum()) for item in items)
    for item in items:
        (-weighted_logprobs(model, [item]) / total).backward()
    return gradients(model)


def flat_batch(model: Any, items: Sequence[Trajectory]) -> Gradients:
    """All trajectories as one padded batch."""
    model.zero_grad()
    total = sum(float(item.loss_weights.sum()) for item in items)
    (-weighted_logprobs(model, items) / total).backward()
    return gradients(model)


def weighted_logprobs(model: Any, items: Sequence[Trajectory]) -> torch.Tensor:
    """Sum of the weighted log-probs, in float32 from the logits on."""
    length = max(len(item) for item in items)
    ids, weights = torch.zeros(len(items), length, dtype=torch.long), torch.zeros(len(items), length)
    mask = torch.zeros(len(items), length, dtype=torch.long)
    for number, item in enumerate(items):
        ids[number, : len(item)] = torch.as_tensor(item.token_ids.astype(np.int64))
        weights[number, : len(item)] = torch.as_tensor(item.loss_weights)
        mask[number, : len(item)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    logprobs = logits.gather(2, ids[:, 1:, None])[..., 0] - torch.logsumexp(logits, dim=-1)
    return (logprobs * weights[:, 1:]).sum()


def gradients(model: Any) -> Gradients:
    return {name: each.grad.float() for name, each in model.named_parameters()}


def deviation(found: Gradients, exact: Gradients) -> float:
    difference = sum(float((found[name] - exact[name]).double().square().sum()) for name in exact)
    return (difference / sum(float(each.double().square().sum()) for each in exact.values())) ** 0.5


if __name__ == "__main__":
    main()
