"""The first three steps of a run on a CPU over its later ones, with and without `tw.keep_freed_memory()`.

    python benchmarks/bench_first_steps.py [--steps 9] [--runs 3] [--size cpu]

Each run is a fresh process that trains a shape of `treewise bench` with random weights on one of its workloads, whole,
by AdamW; the first step allocates gradients and the optimizer's state, as it does in training. The check of the model,
which training makes in its first step, runs before (`check_seconds`). Runs with and without take turns. Seconds are
wall clock, so the machine has to be idle.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch
from common import save

import treewise as tw
from treewise.bench import SIZES, make, random_model

KEEPS, RETURNS = "kept", "returned"
FIRST = 3  # steps that are compared with the later ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--runs", type=int, default=3, help="of each kind")
    parser.add_argument("--model", default="qwen3-17m", help="a shape of treewise bench")
    parser.add_argument("--workload", default="tau2")
    parser.add_argument("--size", default="cpu", choices=SIZES)
    parser.add_argument("--print", action="store_true", help="print the record only; nothing is written")
    parser.add_argument("--memory", choices=(KEEPS, RETURNS), help="one run, in this process")
    args = parser.parse_args()
    if args.steps <= FIRST:
        parser.error(f"--steps is {args.steps}; give more than {FIRST}.")
    if args.memory is not None:
        print(json.dumps(_run(args)))
        return
    rows = []
    for _ in range(args.runs):
        for memory in (KEEPS, RETURNS):
            command = [sys.executable, __file__, *sys.argv[1:], "--memory", memory]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
    if not args.print:
        print(save("first-steps", rows))


def _run(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and minor page faults of each step."""
    model = random_model(args.model, torch.float32, torch.device("cpu"))
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    forest = tw.Forest.from_trajectories(make(args.workload, args.size, vocabulary).trajectories)
    if args.memory == KEEPS and not tw.keep_freed_memory():
        raise SystemExit("this system has no glibc, whose memory could be kept.")
    engine, optimizer = tw.TreeEngine(model), torch.optim.AdamW(model.parameters(), lr=1e-5)
    started = time.perf_counter()
    engine.check(forest)
    check_seconds = time.perf_counter() - started
    seconds, faults = [], []
    for _ in range(args.steps):
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        engine.step(forest)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    later = median(seconds[FIRST:])
    return {
        "memory": args.memory,
        "model": args.model,
        "workload": args.workload,
        "tree_tokens": forest.num_tokens,
        "check_seconds": check_seconds,
        "seconds": seconds,
        "page_faults": faults,
        "later_seconds": later,
        "first_over_later": [each / later for each in seconds[:FIRST]],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    main()
