"""What joining passes over trunks would save on the trees of examples/data, by a measured cost of a pass.

    python benchmarks/trunk_passes.py [--parts 4] [--model qwen3-17m]

A plan under a budget computes trunks without a graph first (`forward` passes), each of them on its own. Two ways to
join them: trunks that follow one another in the schedule, as long as all their tokens are within the budget; or, since
a pass without a graph keeps no activations, each with the first trunk below it, whatever their size.

Costs are CPU seconds of one thread of this process: a forward over chains of T tokens as c + r T, the least of several,
in a model of `treewise bench`; a step of forward and backward the same way. A saved pass saves c.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from common import bundled_trees

import treewise as tw
from treewise.bench import random_model
from treewise.nn.load_model import DEMO_MODEL, load_tokenizer
from treewise.planning.planner import FORWARD, TRAIN, Plan, fastest_plan

LENGTHS = (32, 64, 128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=4, help="budget: the tree over so many")
    parser.add_argument("--model", default="qwen3-17m", help="a shape of treewise bench")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
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
        plan = fastest_plan(forest, max(1, forest.num_tokens // args.parts))
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
