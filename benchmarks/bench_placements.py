"""How even 200 drawn steps are, predicted, and what placing takes: two versions of the placement on the same draws.

Each step has recorded tree shapes, groups of samples with a long tail, or random trees; 2 to 64 ranks; no budget, or
one from 512 to 16,384 tokens. Loads are the work of each rank's own plan under the cost model of bench_balance.py, so
they are the same on every machine; only the time of placing is measured.

    python benchmarks/bench_placements.py before.json        # of the version that is checked out
    python benchmarks/bench_placements.py after.json --against before.json
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from bench_balance import COST, planned
from bench_few_groups import group
from tree_shapes import forest_of, recorded

from treewise.distributed.placement import assign_ranks, work_of
from treewise.testing.strategies import random_tree
from treewise.tree.forest import Forest

NUM_DRAWS = 200
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--draws", type=int, default=NUM_DRAWS)
    args = parser.parse_args()
    pool = [forest for _, forest in recorded()]
    rows = [one_draw(np.random.default_rng([7, seed]), pool) for seed in range(args.draws)]
    args.file.write_text(json.dumps(rows))
    summary("this version", rows)
    if args.against:
        former = json.loads(args.against.read_text())[: args.draws]
        summary("the other", former)
        for name in ("slowest", "slowest_over_mean", "cpu_seconds"):
            ratio = np.array([row[name] / max(other[name], 1e-9) for row, other in zip(rows, former, strict=True)])
            worst = int(ratio.argmax())
            quantiles = np.round(np.quantile(ratio, (0, 0.05, 0.5, 0.95, 1)), 4).tolist()
            print(f"{name}: geometric mean {np.exp(np.log(ratio).mean()):.4f}, quantiles {quantiles}, worst {worst}")
            print("  over 1.01:", [(int(i), round(float(ratio[i]), 3)) for i in np.flatnonzero(ratio > 1.01)][:30])


def one_draw(rng: np.random.Generator, pool: list[Forest]) -> Row:
    num_ranks = int(rng.choice((2, 3, 4, 8, 16, 32, 64)))
    budget = (None, 512, 2048, 8192, 16_384)[int(rng.integers(5))]
    kind = int(rng.integers(4))
    num_trees = max(1, int(num_ranks * rng.choice((0.5, 1, 1.5, 3, 8))))
    if kind < 2:
        trees = [pool[index] for index in rng.choice(len(pool), num_trees)]
        if kind == 1:
            trees = [tree for tree in trees if tree.path_lengths.max() <= 16_384] or trees
    elif kind == 2:
        trees = [group(rng, (2, 8)) for _ in range(num_trees)]
    else:
        trees = [forest_of(random_tree(rng, int(rng.integers(2, 60)), 400).segments) for _ in range(num_trees)]
    started = time.process_time()
    found = assign_ranks(trees, num_ranks, COST, max_tokens=budget, in_lockstep=bool(rng.random() < 0.15))
    seconds = time.process_time() - started
    plans = [planned(trees, found.rank_of_trajectory, rank, budget) for rank in range(num_ranks)]
    loads = np.array([COST.seconds(work_of(each)) if each else 0.0 for each in plans])
    return {
        "slowest": float(loads.max()),
        "slowest_over_mean": float(loads.max() / loads.mean()),
        "slowest_over_bound": float(loads.max() / found.bound_seconds),
        "off_by": float(np.abs(found.seconds - loads).max() / loads.max()),
        "cpu_seconds": seconds,
        "num_ranks": num_ranks,
    }


def summary(name: str, rows: list[Row]) -> None:
    for key in ("slowest_over_mean", "slowest_over_bound", "off_by", "cpu_seconds"):
        values = np.array([row[key] for row in rows])
        quantiles = np.round(np.quantile(values, (0.5, 0.95, 1)), 4).tolist()
        print(f"{name}: {key} median, 95 %, worst {quantiles}, sum {values.sum():.2f}")


if __name__ == "__main__":
    main()
