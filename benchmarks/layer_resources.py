"""Registers, spills and shared memory of all kernels of a compiled layer that is one graph, by ptxas, without a GPU.

    python benchmarks/layer_resources.py --json benchmarks/results/layer-resources.json

Needs the package `triton` (pip install triton), which brings ptxas. A layer of a model's widths, with FlexAttention in
its graph and the tiles that treewise takes, is traced on a CPU, lowered by Inductor for Triton and a card, and each of
its Triton kernels is compiled and assembled for it. Products are of cuBLAS and have no kernel here.
"""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from flex_kernels import GPUS, Gpu, resources, without_gpu  # a neighbour of this script
from layer_kernels import calls_of, counting_backend
from transformers import AutoConfig, AutoModelForCausalLM

from treewise import Forest, Trajectory, TreeEngine
from treewise.bench import SHAPES
from treewise.nn.attention import flex, inside
from treewise.nn.compilation import compile_layers, decoder_layers

_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', \'\'\'(.*?)\'\'\'", re.DOTALL)
VOCABULARY = 512  # of the rows; no kernel of a layer depends on it


def codes_of_layer(name: str, num_tokens: int, gpu: Gpu, dtype: torch.dtype) -> list[str]:
    """The codes of a layer's graphs, forward and backward, for a tree of about so many tokens."""
    kind, sizes = SHAPES[name]
    more = {"num_hidden_layers": 1, "vocab_size": VOCABULARY, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **{**sizes, **more})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    codes: list[str] = []
    of_card = {"BACKEND": flex.TRITON, "IS_DIVISIBLE": True}
    prepared = inside._inside

    def on_card(mask: Any, counts: tuple[int, int, int, int], *given: Any) -> Any:
        tiles = flex.tiles(dtype, counts[2:], flex.Card(gpu.capability, gpu.shared_bytes))
        return replace(prepared(mask, counts, *given), options={**of_card, **tiles})

    prompt, *answers = np.split(np.random.default_rng(0).integers(3, VOCABULARY, num_tokens), 3)
    rows = [Trajectory(np.concatenate([prompt, each])) for each in answers]
    with without_gpu(gpu), mock.patch.object(inside, "_inside", on_card):
        lm = TreeEngine(model, attention="flex", check=False).lm
        compile_layers(lm, "eager", attention_inside=True)
        backend = counting_backend(len, keep=codes.append)
        for layer in decoder_layers(lm):
            layer.compile(dynamic=True, backend=backend)
        TreeEngine(model, attention="flex", check=False).step(Forest.from_trajectories(rows))
    return [code for code in codes if code]


def rows_of(code: str, gpu: Gpu) -> list[dict[str, Any]]:
    """A row for each kernel that a graph's code calls, in the order of the calls."""
    sources = dict(_KERNEL.findall(code))
    names = [name.removesuffix(".run") for name in calls_of(code)]
    return [{"kernel": name, **(resources(sources[name], gpu) if name in sources else {})} for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--num_tokens", type=int, default=1500)
    parser.add_argument("--gpu", choices=GPUS, default="sm_90")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gpu = GPUS[args.gpu]
    codes = codes_of_layer(args.model, args.num_tokens, gpu, getattr(torch, args.dtype))
    import triton

    result: dict[str, Any] = {
        "benchmark": "kernels of a compiled layer in one graph",
        **{"torch": torch.__version__, "triton": triton.__version__, "gpu": args.gpu, "model": args.model},
        **{"dtype": args.dtype, "num_tokens": args.num_tokens, "graphs": []},
    }
    print("| graph | kernel | warps, stages | registers | spilled bytes | shared KiB |")
    print("|---|---|---|---:|---:|---:|")
    for number, code in enumerate(codes):
        rows = rows_of(code, gpu)
        result["graphs"].append(rows)
        for row in rows:
            if "registers" not in row:
                continue
            how = (f"{row['warps']}w {row['stages']}s", row["registers"], row["spilled_bytes"])
            print(f"| {number} | {row['kernel']} | {' | '.join(map(str, how))} | {row['shared_bytes'] / 1024:.1f} |")
        print(f"graph {number}: {len(rows)} launches, {sum('registers' in row for row in rows)} by Triton", flush=True)
    if args.json is not None:
        graphs = (",\n".join("   " + json.dumps(row) for row in rows) for rows in result.pop("graphs"))
        lines = ",\n".join(f"  [\n{graph}\n  ]" for graph in graphs)
        args.json.write_text(f'{json.dumps(result, indent=1)[:-2]},\n "graphs": [\n{lines}\n ]\n}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
