"""Does a policy learn faster with branching and credit? Generated tokens to a success, paired over seeds.

The policy is the table of tabular_policy.py: 5 dependent steps of 10 tokens, one of them a decision, success 0.3 at the
start. Every update is one of Adam on 8 trees of 400 generated tokens; success is exact after each. Each arm has the
rate that reached the goal first, in the median over seeds of its own that are not compared.

    python benchmarks/bench_learning.py [--seeds 16] [--tried 5] [--processes 2]

An arm is compared with independent samples under GRPO's z-score: the ratio of tokens, and of CPU seconds, geometric
mean over seeds, with bootstrap intervals; `detectable` is the smallest ratio that a comparison of so many seeds with
the spread that was seen shows four times out of five.
"""

import argparse
import multiprocessing
import time
from dataclasses import replace
from typing import Any

import numpy as np
from bench_gradients import ARMS, CREDITS
from common import save
from tabular_policy import Game, grown, new_game

from treewise.rl.branching import branching_named
from treewise.rl.update import ADVANTAGES

START = new_game(5, 0.3, step_tokens=10)
TREES, ROLLOUTS, GOAL, MOST = 8, 8, 0.6, 150  # of an update; updates at most
RATES = (0.02, 0.04, 0.08, 0.16)
UNIFORM = ("none", "group z-score")
# What bench_gradients.py says should help, by how much it says so; the last should not.
COMPARED = (
    UNIFORM,
    ("none", "leave one out"),
    ("random", "leave one out"),
    ("random", "TreePO"),
    ("turns", "TreePO"),
    ("lcr", "leave one out"),
    ("lcr", "TreePO"),
    ("random", "siblings"),
)


class Adam:
    """Ascent on an array."""

    def __init__(self, rate: float, shape: tuple[int, ...]) -> None:
        self.rate, self.count = rate, 0
        self.first, self.second = np.zeros(shape), np.zeros(shape)

    def step(self, gradient: np.ndarray) -> np.ndarray:
        """What is added."""
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first, second = self.first / (1 - 0.9**self.count), self.second / (1 - 0.999**self.count)
        return self.rate * first / (np.sqrt(second) + 1e-8)


def learned(cell: tuple[str, str], rate: float, seed: int) -> dict[str, Any]:
    """One run: tokens and CPU seconds to the goal; infinite where it was not reached."""
    arm, (method, settings) = ARMS[cell[0]], CREDITS[cell[1]]
    game, adam, tokens, began = START, Adam(rate, START.logits.shape), 0, time.process_time()
    curve = [(0, game.success)]
    for update in range(MOST):
        trees = grown(
            game,
            branching_named(arm.branching, **arm.settings),
            TREES,
            ROLLOUTS * game.num_tokens,
            1_000 * seed + update,
            turns=arm.turns,
        )
        tokens += sum(tree.num_sampled_tokens for tree in trees)
        game = replace(game, logits=game.logits + adam.step(gradient_of(game, trees, method, settings)))
        curve.append((tokens, round(game.success, 4)))
        if game.success >= GOAL:
            return {"tokens": tokens, "seconds": time.process_time() - began, "updates": update + 1, "curve": curve}
    return {"tokens": np.inf, "seconds": np.inf, "updates": MOST, "curve": curve}


def gradient_of(game: Game, trees: list[Any], method: str, settings: dict[str, Any]) -> np.ndarray:
    """The mean over trees of the gradient of each."""
    rows = [tree.trajectories() for tree in trees]
    credited = iter(ADVANTAGES[method]([row for own in rows for row in own], **settings).trajectories)
    return sum(game.estimate([next(credited) for _ in own]) for own in rows) / len(rows)


def _work(task: tuple[tuple[str, str], float, int]) -> dict[str, Any]:
    cell, rate, seed = task
    return {"branching": cell[0], "credit": cell[1], "rate": rate, "seed": seed, **learned(cell, rate, seed)}


def best_rates(pool: Any, seeds: int) -> dict[tuple[str, str], float]:
    """The rate of each cell, from seeds that are not compared."""
    tasks = [(cell, rate, 1_000 + seed) for cell in COMPARED for rate in RATES for seed in range(seeds)]
    found = pool.map(_work, tasks, chunksize=1)
    chosen = {}
    for cell in COMPARED:
        own = [row for row in found if (row["branching"], row["credit"]) == cell]
        typical = {rate: np.median([row["tokens"] for row in own if row["rate"] == rate]) for rate in RATES}
        chosen[cell] = min(RATES, key=lambda rate: typical[rate])
        print(cell, {rate: float(tokens) for rate, tokens in typical.items()}, flush=True)
    return chosen


def compared(runs: list[dict[str, Any]], cell: tuple[str, str]) -> dict[str, Any]:
    """The row of one cell."""
    values = {}
    for each in runs:
        for name in ("tokens", "seconds"):
            values[each["branching"], each["credit"], each["seed"], name] = each[name]
    seeds = sorted({each["seed"] for each in runs})
    row: dict[str, Any] = {"branching": cell[0], "credit": cell[1]}
    row["rate"] = next(each["rate"] for each in runs if (each["branching"], each["credit"]) == cell)
    row["reached"] = sum(bool(np.isfinite(values[*cell, seed, "tokens"])) for seed in seeds)
    row["tokens"] = float(np.median([values[*cell, seed, "tokens"] for seed in seeds]))
    row["seconds"] = round(float(np.median([values[*cell, seed, "seconds"] for seed in seeds])), 2)
    for name in ("tokens", "seconds"):
        pairs = [(values[*cell, seed, name], values[*UNIFORM, seed, name]) for seed in seeds]
        both = [np.log(own / other) for own, other in pairs if np.isfinite(own) and np.isfinite(other)]
        if len(both) > 1:
            logs, rng = np.array(both), np.random.default_rng(0)
            drawn = rng.choice(logs, (2_000, len(logs))).mean(1)
            ratios = np.exp([logs.mean(), *np.quantile(drawn, [0.025, 0.975])])
            row[f"{name}_ratio"] = [round(float(each), 3) for each in ratios]
            row[f"{name}_detectable"] = round(float(np.exp(-2.8 * logs.std(ddof=1) / np.sqrt(len(logs)))), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--tried", type=int, default=5, help="seeds that choose the rate")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        rates = best_rates(pool, args.tried)
        tasks = [(cell, rates[cell], seed) for cell in COMPARED for seed in range(args.seeds)]
        runs = pool.map(_work, tasks, chunksize=1)
    rows = [compared(runs, cell) for cell in COMPARED]
    for row in rows:
        print(row)
    curves = [{**run, "curve": run["curve"][::3]} for run in runs]
    print("written to", save("learning", [*rows, *({"part": "run", **each} for each in curves)]))


if __name__ == "__main__":
    main()
