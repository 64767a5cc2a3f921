"""Gradients of bfloat16 training against float32: how far flat training strays, and how far the tree does.

What rounding does to a gradient depends on the order of operations, so flat training is measured in three forms: each
trajectory alone with SDPA, the same with the model's eager attention, and one padded batch. Deviation: norm of the
difference of the whole gradient from the float32 flat one, over that one's norm.

    python benchmarks/bench_precision.py [--trees 6] [--trajectories 5]
"""

import argparse
from collections.abc import Sequence
from math import exp, log
from typing import Any

import numpy as np
import torch
from common import bundled_trees, save, smollm2

from treewise.engine.engine import TreeEngine
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

Gradients = dict[str, torch.Tensor]
MAX_LENGTH = 500  # keeps a tree within a minute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", type=int, default=6)
    parser.add_argument("--trajectories", type=int, default=5, help="of each tree")
    args = parser.parse_args()
    exact_model, tokenizer = smollm2(torch.float32)
    model, _ = smollm2(torch.bfloat16)
    rows: list[dict[str, Any]] = []
    for name, items in chosen(bundled_trees(tokenizer), args.trees, args.trajectories):
        exact = flat(exact_model, items)
        forest = Forest.from_trajectories(items)
        row: dict[str, Any] = {"tree": name, "tree_tokens": forest.num_tokens, "flat_tokens": forest.num_flat_tokens}
        row |= {key: round(deviation(found, exact), 4) for key, found in contestants(model, forest, items)}
        rows.append(row)
        print(row, flush=True)
    means = {key: round(exp(sum(log(row[key]) for row in rows) / len(rows)), 4) for key in list(rows[0])[3:]}
    print("geometric means", means)
    print("written to", save("precision", [*rows, {"tree": "geometric mean", **means}]))


def chosen(
    trees: dict[str, list[Trajectory]], num_trees: int, num_trajectories: int
) -> list[tuple[str, list[Trajectory]]]:
    """Some trajectories of some trees, spread evenly over each tree, not longer than `MAX_LENGTH`."""
    found = []
    for name, items in trees.items():
        short = [item for item in items if len(item) <= MAX_LENGTH]
        picked = (
            [short[number] for number in np.linspace(0, len(short) - 1, num_trajectories).astype(int)] if short else []
        )
        if len({id(item) for item in picked}) == num_trajectories:
            found.append((name, picked))
    step = max(1, len(found) // num_trees)
    return found[::step][:num_trees]


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
