"""What the peak FLOPs and the bandwidth of a GPU allow on the workloads of `make bench-gpu`; needs no GPU.

    python benchmarks/predict_gpu.py [--gpu H200] [--model qwen3-8b ...]

A bound for steps without budget or checkpointing, flat and on the tree, as a table.
"""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoConfig

from treewise.bench import SHAPES, make
from treewise.nn.attention import TreeMask
from treewise.nn.attention.flex import BLOCK_SIZE, num_key_rows
from treewise.nn.flops import FlopModel, LayerReach, flat_head_rows, tree_head_rows
from treewise.nn.model_flops import flop_model_of_config
from treewise.planning.partition import ATTENTION_BACKWARD
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.tree.forest import Forest

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")
WORKLOADS = ("tau2", "ratio-6.5", "164k-83k", "grpo", "no-sharing")
ITEM_BYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Gpu:
    """Dense bfloat16 FLOPs and bytes of memory, per second, from the vendor's data sheet.

    What they allow is a bound, not a forecast. Each part takes what its FLOPs take at the peak, or what its bytes take
    at the bandwidth, whichever is more. Attention counts whole blocks of 128 x 128, as FlexAttention computes them,
    with the keys and values of each block read once per key head; linear layers read their weights three times (forward
    and both gradients), write the gradients, and write and read the activations that are kept. Launches, norms, the
    optimizer and exchanges between GPUs are left out.
    """

    flops: float
    bandwidth: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Of one part."""
        return max(flops / self.flops, num_bytes / self.bandwidth)


GPUS = {
    "A100": Gpu(312e12, 2.04e12),
    "H100": Gpu(989e12, 3.35e12),
    "H200": Gpu(989e12, 4.8e12),
    "B200": Gpu(2_250e12, 8e12),
}


def bound_seconds(flops: FlopModel, forest: Forest, gpu: Gpu) -> dict[str, float]:
    """Of a step without a budget: `flat`, every trajectory alone in packed rows, and `tree`.

    flops: of a model whose attention looks back without windows or chunks.
    """
    lengths = -(-forest.path_lengths.astype(np.int64) // BLOCK_SIZE)
    mask = TreeMask.from_layout(lay_out(plan(forest), 0))
    # Tokens, projected rows, and blocks of attention.
    flat = forest.num_flat_tokens, flat_head_rows(forest), float((lengths * (lengths + 1) // 2).sum())
    tree = forest.num_tokens, tree_head_rows(forest), num_key_rows(mask, torch.device("cpu")) / BLOCK_SIZE
    return {"flat": _seconds(flops, gpu, *flat), "tree": _seconds(flops, gpu, *tree)}


def _seconds(flops: FlopModel, gpu: Gpu, num_tokens: int, num_rows: int, num_blocks: float) -> float:
    weights, activations = flops.linear / 2 * 4, 2 * flops.activation_values * num_tokens
    linear = gpu.seconds((flops.linear + flops.linear_backward) * num_tokens, (weights + activations) * ITEM_BYTES)
    head = gpu.seconds((flops.head + flops.head_backward) * num_rows, 2 * flops.head * ITEM_BYTES)
    pairs = num_blocks * BLOCK_SIZE**2 * sum(pair for reach, pair in flops.pair_forward if reach == LayerReach())
    moved = flops.gateway_values * (num_blocks * BLOCK_SIZE + num_tokens) * ITEM_BYTES  # keys and values, all layers
    return linear + head + gpu.seconds(pairs, moved) + gpu.seconds(ATTENTION_BACKWARD * pairs, 2 * moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=GPUS, default="H200")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    args = parser.parse_args()
    forests = {name: Forest.from_trajectories(make(name, "full", 151_936).trajectories) for name in WORKLOADS}
    print(f"| {args.gpu} | workload | tokens flat : tree | flat, s | tree, s | speed-up | FLOP bound |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for model in args.model:
        kind, sizes = SHAPES[model]
        flops = flop_model_of_config(AutoConfig.for_model(kind, **sizes))
        for name, forest in forests.items():
            seconds = bound_seconds(flops, forest, GPUS[args.gpu])
            bound = flops.flat(forest) / flops.tree(forest)
            tokens = f"{forest.num_flat_tokens:,} : {forest.num_tokens:,}"
            ratio = seconds["flat"] / seconds["tree"]
            row = (
                model,
                name,
                tokens,
                f"{seconds['flat']:.3f}",
                f"{seconds['tree']:.3f}",
                f"{ratio:.2f}",
                f"{bound:.2f}",
            )
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
