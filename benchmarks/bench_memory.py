"""Peak memory of a training step over budgets: one micro-batch, what is held, and the gateways of one path.

Each budget runs in a process of its own. On CPU the peak resident set above the loaded model with its gradients, on
CUDA the allocator's peak.

    python benchmarks/bench_memory.py [--trees game24-904 airline-38] [--budgets 0 1024 512 256 128]
"""

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

import torch
from common import bundled_trees, save, smollm2

from treewise.budget import gateway_bytes
from treewise.engine import TreeEngine
from treewise.forest import Forest

# The whole tree, and one path: a single trajectory without forks.
CASES = {"game24-904": None, "airline-38": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", nargs="*", default=["game24-904"])
    parser.add_argument("--budgets", nargs="*", type=int, default=[0, 1024, 512, 256, 128], help="0: no budget")
    parser.add_argument("--one", nargs=2, metavar=("TREE", "BUDGET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]) or None)))
        return
    rows = []
    for tree in args.trees:
        for budget in args.budgets:
            command = [sys.executable, __file__, "--one", tree, str(budget)]
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows.append(json.loads(found.splitlines()[-1]))
            print(rows[-1], flush=True)
    print("written to", save("memory", rows))


def measure(name: str, budget: int | None) -> dict[str, Any]:
    model, tokenizer = smollm2(torch.float32)
    forest = Forest.from_trajectories(bundled_trees(tokenizer)[name][: CASES.get(name)])
    engine = TreeEngine(model, budget)
    small = Forest.from_trajectories(forest.trajectories[:1]) if forest.num_trajectories > 1 else forest
    if budget != forest.num_tokens:  # gradients and the probe, before the baseline is taken
        TreeEngine(model, 64).step(small)
    model.zero_grad(set_to_none=False)
    before = _peak_bytes(reset=True)
    out = engine.step(forest)
    plan = engine.plan(forest)
    gateways = plan.peak_gateway_tokens * gateway_bytes(engine.parts)
    return {
        "tree": name,
        "tree_tokens": forest.num_tokens,
        "max_tokens": budget,
        "num_micro_batches": out.num_micro_batches,
        "computed_tokens": out.num_computed_tokens,
        "gateway_mib": round(gateways / 2**20),
        "peak_mib": round((_peak_bytes() - before) / 2**20),
        "loss": out.loss,
    }


def _peak_bytes(reset: bool = False) -> int:
    """The highest memory so far; on CPU the present resident set when reset, because its peak never falls."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated()
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the kernel's own reset of the peak
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    main()
