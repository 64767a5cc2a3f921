"""What fewer passes would save: a bound for any plan, and passes over trunks by a measured cost.

    python benchmarks/trunk_passes.py --bound [--parts 4 8] [--json FILE]
    python benchmarks/trunk_passes.py [--parts 4] [--model qwen3-17m]

The bound (`--bound`), on the trees of examples/data and of `treewise bench`. Whichever pieces run together, a plan with
at most B live tokens that recomputes as many tokens as ours has at least tokens / B passes with a graph and recomputed
tokens / B without, each rounded up. A pass without a graph reads all weights once; one with a graph reads them twice,
and reads and writes all gradients. Time is what the planner compares plans by (`Plan.relative_cost`).

Without it, what joining passes over trunks would save on the trees of examples/data.

A plan under a budget computes trunks without a graph first (`forward` passes), each of them on its own. Two ways to
join them: trunks that follow one another in the schedule, as long as all their tokens are within the budget; or, since
a pass without a graph keeps no activations, each with the first trunk below it, whatever their size.

Costs are CPU seconds of one thread of this process: a forward over chains of T tokens as c + r T, the least of several,
in a model of `treewise bench`; a step of forward and backward the same way. A saved pass saves c.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import bundled_trees

import treewise as tw
from treewise.bench import make, random_model
from treewise.models.load_model import DEMO_MODEL, load_tokenizer
from treewise.planning.fastest import fastest_plan
from treewise.planning.partition import FORWARD_FRACTION, TOKENS_PER_LAUNCH
from treewise.planning.plans import FORWARD, TRAIN, Plan

LENGTHS = (32, 64, 128, 256, 512)
WORKLOADS = ("grpo", "turns-40", "turns-100", "search", "no-sharing", "ratio-6.5", "164k-83k", "tau2")
VOCABULARY = 2048  # of the workloads' random tokens, of which no plan depends on
GRAPH_WEIGHTS, FORWARD_WEIGHTS = 4, 1  # times that a pass moves as many bytes as the weights have


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bound", action="store_true", help="the least passes of any plan, beside ours")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8], help="budget: the tree over so many")
    parser.add_argument("--json", type=Path, help="with --bound")
    parser.add_argument("--model", default="qwen3-17m", help="a shape of treewise bench")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    if args.bound:
        compare_with_bound(args.parts, args.json)
        return
    model = random_model(args.model, torch.float32, torch.device("cpu"))
    engine = tw.TreeEngine(model, check=False)
    chains = [tw.Forest.from_trajectories([tw.Trajectory(np.arange(length) % 50 + 3)]) for length in LENGTHS]
    with torch.no_grad():
        forward = _line([_least(partial(engine.hidden_states, chain), args.repetitions) for chain in chains])
    step = _line([_least(partial(engine.step, chain), args.repetitions) for chain in chains])
    print(f"{args.model}: forward {_shown(forward)}, forward and backward {_shown(step)}")
    print(
        "tree, tokens, budget, passes (forward), rows of a forward pass, joined within the budget, along paths, % saved"
    )
    saved: list[tuple[float, float]] = []
    for name, items in bundled_trees(load_tokenizer(DEMO_MODEL)).items():
        forest = tw.Forest.from_trajectories(items)
        plan = fastest_plan(forest, max(1, forest.num_tokens // args.parts[0]))
        sizes = [plan.micro_batches[each.micro_batch].num_tokens for each in plan.schedule if each.action == FORWARD]
        if not sizes:
            print(f"{name}, {forest.num_tokens:,}: no trunk runs twice")
            saved.append((0.0, 0.0))
            continue
        rows = [plan.micro_batches[each.micro_batch].num_tokens for each in plan.schedule if each.action == TRAIN]
        seconds = sum(forward[0] + forward[1] * size for size in sizes) + sum(step[0] + step[1] * size for size in rows)
        within, along = _joined_within(plan), _joined_along(plan)
        saved.append((100 * within * forward[0] / seconds, 100 * along * forward[0] / seconds))
        print(
            f"{name}, {forest.num_tokens:,}, {plan.max_tokens:,}, {len(plan.schedule)} ({len(sizes)}), "
            f"{sorted(sizes)}, {within}, {along}, {saved[-1][0]:.2f} {saved[-1][1]:.2f}"
        )
    for index, what in enumerate(("within the budget", "along paths")):
        values = [each[index] for each in saved]
        beyond = sum(each > 3 for each in values)
        print(
            f"{what}: mean {np.mean(values):.2f} %, most {max(values):.2f} %, beyond 3 % in {beyond} of {len(values)}"
        )


def compare_with_bound(parts: list[int], file: Path | None) -> None:
    trees = {name: make(name, "cpu", VOCABULARY).trajectories for name in WORKLOADS}
    trees |= bundled_trees(load_tokenizer(DEMO_MODEL))
    rows: list[dict[str, Any]] = []
    print("tree, tokens, budget, passes with a graph and the least, without and the least, % of time, % of bytes")
    for part in parts:
        found = []
        for name, items in trees.items():
            forest = tw.Forest.from_trajectories(items)
            found.append({"tree": name, "part": part} | bound(forest, max(1, forest.num_tokens // part)))
            print(", ".join(map(str, found[-1].values())), flush=True)
        rows += found
        for what in ("excess_time", "excess_bytes"):
            values = [100 * each[what] for each in found]
            print(f"1 / {part}: {what} mean {np.mean(values):.1f} %, most {max(values):.1f} %")
        excess = [each["graph_passes"] - each["least_graph_passes"] for each in found]
        print(f"1 / {part}: passes with a graph beyond the least: {sorted(excess)}")
    if file is not None:
        record = {"benchmark": "passes of plans and the least of any", "tokens_per_pass": TOKENS_PER_LAUNCH}
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        file.write_text(f'{json.dumps(record, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')


def bound(forest: tw.Forest, max_tokens: int) -> dict[str, Any]:
    """Passes of our plan under a budget, and the least of any that recomputes as many tokens. excess_*: of time and of
    the bytes of weights, in parts of the least."""
    plan = fastest_plan(forest, max_tokens)
    graph, without = plan.num_micro_batches, sum(each.action == FORWARD for each in plan.schedule)
    least, least_without = (-(-each // max_tokens) for each in (forest.num_tokens, plan.num_recomputed_tokens))
    saved = TOKENS_PER_LAUNCH * (graph - least + FORWARD_FRACTION * (without - least_without))
    passes = ((graph, without), (least, least_without))
    moved, least_moved = (GRAPH_WEIGHTS * each + FORWARD_WEIGHTS * other for each, other in passes)
    return {
        "tokens": forest.num_tokens,
        "max_tokens": max_tokens,
        "graph_passes": graph,
        "least_graph_passes": least,
        "forward_passes": without,
        "least_forward_passes": least_without,
        "excess_time": round(saved / (plan.relative_cost - saved), 4),
        "excess_bytes": round(moved / least_moved - 1, 4),
    }


def _joined_within(plan: Plan) -> int:
    """Forward passes that are saved if neighbours in the schedule's order share one as long as the budget has room."""
    assert plan.max_tokens is not None
    count, room = 0, 0
    for each in plan.schedule:
        if each.action == FORWARD:
            size = plan.micro_batches[each.micro_batch].num_tokens
            count += size <= room
            room = (room if size <= room else plan.max_tokens) - size
    return count


def _joined_along(plan: Plan) -> int:
    """Forward passes that are saved if one computes all trunks along a path: each trunk joins the first below it."""
    parents = {
        above
        for each in plan.schedule
        if each.action == FORWARD
        for above in plan.micro_batches[each.micro_batch].parents
    }
    return len(parents)


def _least(run: Callable[[], object], repetitions: int) -> float:
    """CPU seconds, the least of several, after one to warm up."""
    run()
    found = []
    for _ in range(repetitions):
        started = time.process_time()
        run()
        found.append(time.process_time() - started)
    return min(found)


def _line(seconds: list[float]) -> tuple[float, float]:
    """c and r of c + r T by least squares over `LENGTHS`."""
    slope, offset = np.polyfit(LENGTHS, seconds, 1)
    return max(0.0, float(offset)), float(slope)


def _shown(line: tuple[float, float]) -> str:
    return f"{1e3 * line[0]:.1f} ms + {1e3 * line[1]:.3f} ms a token"


if __name__ == "__main__":
    main()
