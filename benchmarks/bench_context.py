"""When a budget on one device is the better choice than `context_size`: memory and CPU time of one step on one tree.

Each contestant runs in processes forked from this one, on one thread each, by gloo: memory is the peak resident set of
the process that needs most, above the model with its gradients, in a first step, in which bytes are counted, too; CPU
seconds are the sum over processes, the less of two further steps.

    python benchmarks/bench_context.py [--wall]

`--wall` also notes the seconds of a step: on a machine that has an idle core for each process.
"""

import argparse
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_bytes import Collectives, fork
from common import save
from transformers import AutoConfig, AutoModelForCausalLM

from treewise.bench.measure import peak_bytes
from treewise.distributed.context import context_group
from treewise.engine.engine import TreeEngine
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

VOCABULARY = 2_048
# Processes, budget as a part of the tree (None: none), activation checkpoints.
CONTESTANTS: list[tuple[int, float | None, bool]] = [
    *((1, part, False) for part in (None, 1 / 2, 1 / 4)),
    *((2, part, False) for part in (None, 1 / 2)),
    *((size, None, True) for size in (1, 2)),
]


def the_model() -> torch.nn.Module:
    """A Qwen3 shape of 4 layers and 4 million parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.for_model("qwen3", **sizes, **heads, tie_word_embeddings=True, pad_token_id=None)
    return AutoModelForCausalLM.from_config(config).train()


def trees() -> dict[str, Forest]:
    """Two trees of 4,096 tokens: a path of 3,072 that four branches of 256 leave, and twelve answers to one prompt."""
    rng = np.random.default_rng(0)
    path = rng.integers(3, VOCABULARY, 3_072)
    branches = [np.concatenate([path[:cut], rng.integers(3, VOCABULARY, 256)]) for cut in range(512, 2_049, 512)]
    prompt = rng.integers(3, VOCABULARY, 1_024)
    answers = [np.concatenate([prompt, rng.integers(3, VOCABULARY, 256)]) for _ in range(12)]
    rows = {"long path": [*branches, path], "answers": answers}
    return {name: Forest.from_trajectories([Trajectory(ids) for ids in each]) for name, each in rows.items()}


def measure(forest: Forest, size: int, budget: int | None, *, checkpoints: bool) -> dict[str, Any]:
    """Peak bytes, CPU seconds and bytes sent of this process."""
    torch.set_num_threads(1)
    model: Any = the_model()
    if checkpoints:
        model.activation_checkpointing_enable()
    engine = TreeEngine(model, budget, context=context_group(size, "cpu"))
    engine.step([Trajectory(np.arange(3, 67))])  # gradients and the probe, before the baseline is taken
    found: dict[str, Any] = {"cpu": [], "wall": []}
    device = torch.device("cpu")
    for is_timed in (False, True, True):
        model.zero_grad(set_to_none=False)
        before = peak_bytes(device, reset=True)
        mode = Collectives()
        cpu, wall = time.process_time(), time.perf_counter()
        with nullcontext() if is_timed else mode:
            out = engine.step(forest)
        if is_timed:
            found["cpu"].append(time.process_time() - cpu)
            found["wall"].append(time.perf_counter() - wall)
        else:
            sent = sum(value for kind, value in mode.sent.items() if kind in ("all_gather", "reduce_scatter"))
            peak = peak_bytes(device) - before
            found |= {"peak": peak, "sent": sent, "computed": out.num_computed_tokens, "loss": out.loss}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wall", action="store_true", help="also note the seconds of a step")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, forest in trees().items():
        for size, part, checkpoints in CONTESTANTS:
            budget = None if part is None else int(part * forest.num_tokens)
            with tempfile.TemporaryDirectory() as folder:
                found = fork(size, Path(folder), partial(measure, forest, size, budget, checkpoints=checkpoints))
            row = {
                "tree": name, "tokens": forest.num_tokens, "processes": size, "max_tokens": budget,
                "checkpoints": checkpoints, "computed_tokens": found[0]["computed"], "loss": found[0]["loss"],
                "peak_mib": round(max(each["peak"] for each in found) / 2**20, 1),
                "cpu_seconds": round(min(map(sum, zip(*(each["cpu"] for each in found), strict=True))), 2),
                "sent_bytes": round(max(each["sent"] for each in found)),
            }  # fmt: skip
            if args.wall:
                row["seconds"] = round(min(map(max, zip(*(each["wall"] for each in found), strict=True))), 2)
            rows.append(row)
            print(row, flush=True)
    print(save("context", rows))


if __name__ == "__main__":
    main()
