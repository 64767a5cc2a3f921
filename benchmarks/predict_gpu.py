"""What the peak FLOPs and the bandwidth of a GPU allow on the workloads of `make bench-gpu`; needs no GPU.

    python benchmarks/predict_gpu.py [--gpu H200] [--model qwen3-8b ...]

A bound for steps without budget or checkpointing, flat and on the tree (`treewise.bench.suite`), as a table.
"""

import argparse

from transformers import AutoConfig

from treewise.bench import SHAPES, make
from treewise.bench.suite import GPUS, bound_seconds
from treewise.nn.flops import flop_model_of_config
from treewise.tree.forest import Forest

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")
WORKLOADS = ("tau2", "ratio-6.5", "164k-83k", "grpo", "no-sharing")


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
