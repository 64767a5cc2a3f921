"""Seconds of one training step, flat and tree, side by side.

Contestants, in one process, taking turns: every trajectory alone; only those that are not contained in another (the
honest baseline); TRL's tree rows; treewise whole; treewise at a half and a quarter of the tree. All use the same model
and the same head. Efficiency is the speed-up over flat divided by the FLOP bound.

    python benchmarks/bench_step.py [--dtype float32] [--repetitions 3] [--trees NAME ...]
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from common import bundled_trees, paired_seconds, save, smollm2, spread

from treewise.bench.contestants import plain_parts
from treewise.bench.trl_rows import TrlRows
from treewise.engine import TreeEngine
from treewise.errors import ConfigError
from treewise.flops import flop_model, leaf_trajectories
from treewise.forest import Forest
from treewise.models import ModelParts
from treewise.trajectory import Trajectory

# Cut to what flat training does in a minute on two cores; the cut keeps whole trajectories.
CASES = {
    "crosswords-8-first-20": 20,
    "game24-937-first-20": 20,
    "game24-904": 18,
    "toolbench-G3-15": 3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--trees", nargs="*", default=list(CASES))
    args = parser.parse_args()
    model, tokenizer = smollm2(getattr(torch, args.dtype))
    trees = bundled_trees(tokenizer)
    rows = []
    for name in args.trees:
        rows.append(measure(model, name, trees[name][: CASES.get(name)], args.repetitions) | {"dtype": args.dtype})
        print_row(rows[-1])
    print("written to", save(f"step-{args.dtype}", rows))


def measure(model: Any, name: str, items: Sequence[Trajectory], repetitions: int) -> dict[str, Any]:
    plain = plain_parts(model)
    forest = Forest.from_trajectories(items)
    engine, flops = TreeEngine(model), flop_model(model)
    denominator = float(forest.token_weights().sum())
    alone = [Forest.from_trajectories([item]) for item in items]
    leaves = leaf_trajectories(forest)
    half, quarter = (TreeEngine(model, max(1, forest.num_tokens // part), check=False) for part in (2, 4))

    def flat(forests: Sequence[Forest]) -> None:
        for each in forests:
            engine.step(each, denominator=denominator)
        model.zero_grad(set_to_none=False)

    def tree(chosen: TreeEngine) -> None:
        chosen.step(forest, denominator=denominator)
        model.zero_grad(set_to_none=False)

    contestants = {
        "flat": lambda: flat(alone),
        "whole": lambda: tree(engine),
        "half": lambda: tree(half),
        "quarter": lambda: tree(quarter),
        **_trl(plain, items),
    }
    if len(leaves) < len(alone):
        contestants["leaves"] = lambda: flat([Forest.from_trajectories([items[index]]) for index in leaves])
    seconds = {key: spread(value) for key, value in paired_seconds(contestants, repetitions).items()}
    bound = flops.flat(forest) / flops.tree(forest)
    speed_up = seconds["flat"]["median"] / seconds["whole"]["median"]
    return {
        "tree": name,
        "num_trajectories": len(items),
        "flat_tokens": forest.num_flat_tokens,
        "tree_tokens": forest.num_tokens,
        "share_ratio": forest.share_ratio,
        "leaf_ratio": forest.leaf_ratio,
        "num_segments": len(forest.segments.start),
        "flop_bound": bound,
        "speed_up": speed_up,
        "efficiency": speed_up / bound,
        "computed_tokens": {
            "half": half.plan(forest).num_computed_tokens,
            "quarter": quarter.plan(forest).num_computed_tokens,
        },
        "seconds": seconds,
    }


def _trl(plain: ModelParts, items: Sequence[Trajectory]) -> dict[str, Any]:
    try:
        rows = TrlRows(plain, items)
    except ConfigError:
        return {}

    def step() -> None:
        rows.step()
        plain.model.zero_grad(set_to_none=False)

    return {"trl": step}


def print_row(row: dict[str, Any]) -> None:
    seconds = {name: value["median"] for name, value in row["seconds"].items()}
    whole = seconds["whole"]
    others = ", ".join(f"{name} {value:.2f} s ({value / whole:.2f})" for name, value in seconds.items())
    print(
        f"{row['tree']}: {row['tree_tokens']} tree tokens, {row['num_segments']} segments, "
        f"speed-up {row['speed_up']:.2f} of {row['flop_bound']:.2f}, efficiency {row['efficiency']:.2f}; {others}",
        flush=True,
    )


if __name__ == "__main__":
    main()
