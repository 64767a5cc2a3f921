"""Does a policy learn faster with branching and credit? Generated tokens to a success, paired over seeds.

The policy is the table of tabular_policy.py: 5 dependent steps of 10 tokens, one of them a decision, success 0.3 at the
start and 0.8 at the goal, exact after each update. An update takes 2 trees of 400 generated tokens. Its step is of one
length whatever the gradient's (`length`: only the direction of an estimate counts, as under a clipped norm), or Adam's.

    python benchmarks/bench_learning.py [--seeds 32] [--processes 2]

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
TREES, ROLLOUTS, GOAL, MOST = 2, 8, 0.8, 300  # of an update; updates at most
UNIFORM = ("none", "group z-score")
# What bench_gradients.py says should help, by how much it says so; the last should not.
COMPARED: tuple[tuple[str, str], ...] = (
    UNIFORM,
    ("none", "leave one out"),
    ("random", "leave one out"),
    ("random", "TreePO"),
    ("turns", "TreePO"),
    ("lcr", "leave one out"),
    ("lcr", "TreePO"),
    ("random", "siblings"),
)


class Steps:
    """Ascent by steps of one length."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def step(self, gradient: np.ndarray) -> np.ndarray:
        """What is added."""
        return 0.3 * gradient / max(np.linalg.norm(gradient), 1e-12)


class Adam(Steps):
    """Ascent by Adam."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.count, self.first, self.second = 0, np.zeros(shape), np.zeros(shape)

    def step(self, gradient: np.ndarray) -> np.ndarray:
        """What is added."""
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first, second = self.first / (1 - 0.9**self.count), self.second / (1 - 0.999**self.count)
        return 0.02 * first / (np.sqrt(second) + 1e-8)


OPTIMIZERS = {"length": Steps, "Adam": Adam}


def learned(cell: tuple[str, str], optimizer: str, seed: int) -> dict[str, Any]:
    """One run: tokens and CPU seconds to the goal; infinite where it was not reached."""
    arm, (method, settings) = ARMS[cell[0]], CREDITS[cell[1]]
    game, ascent, tokens, began = START, OPTIMIZERS[optimizer](START.logits.shape), 0, time.process_time()
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
        game = replace(game, logits=game.logits + ascent.step(gradient_of(game, trees, method, settings)))
        curve.append((tokens, round(game.success, 4)))
        if game.success >= GOAL:
            return {"tokens": tokens, "seconds": time.process_time() - began, "updates": update + 1, "curve": curve}
    return {"tokens": np.inf, "seconds": np.inf, "updates": MOST, "curve": curve}


def gradient_of(game: Game, trees: list[Any], method: str, settings: dict[str, Any]) -> np.ndarray:
    """The mean over trees of the gradient of each."""
    rows = [tree.trajectories() for tree in trees]
    credited = iter(ADVANTAGES[method]([row for own in rows for row in own], **settings).trajectories)
    return sum(game.estimate([next(credited) for _ in own]) for own in rows) / len(rows)


def _work(task: tuple[tuple[str, str], str, int]) -> dict[str, Any]:
    cell, optimizer, seed = task
    facts = {"optimizer": optimizer, "branching": cell[0], "credit": cell[1], "seed": seed}
    return facts | learned(*task)


def compared(runs: list[dict[str, Any]], optimizer: str, cell: tuple[str, str]) -> dict[str, Any]:
    """The row of one cell."""
    runs = [each for each in runs if each["optimizer"] == optimizer]
    own, base = (
        sorted((each for each in runs if (each["branching"], each["credit"]) == key), key=lambda each: each["seed"])
        for key in (cell, UNIFORM)
    )
    row: dict[str, Any] = {"optimizer": optimizer, "branching": cell[0], "credit": cell[1], "seeds": len(own)}
    row["reached"] = sum(bool(np.isfinite(each["tokens"])) for each in own)
    row["updates"] = float(np.median([each["updates"] for each in own]))
    for name in ("tokens", "seconds"):
        values, others = (np.array([each[name] for each in part]) for part in (own, base))
        row[name] = round(float(np.median(values)), 2)
        logs = np.log(values / others)
        if np.isfinite(logs).all():
            drawn = np.random.default_rng(0).choice(logs, (2_000, len(logs))).mean(1)
            row[f"{name}_ratio"] = [
                round(float(np.exp(each)), 3) for each in (logs.mean(), *np.quantile(drawn, [0.025, 0.975]))
            ]
            row[f"{name}_detectable"] = round(float(np.exp(-2.8 * logs.std(ddof=1) / np.sqrt(len(logs)))), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    cells = [(optimizer, cell) for optimizer in OPTIMIZERS for cell in COMPARED]
    tasks = [(cell, optimizer, seed) for optimizer, cell in cells for seed in range(args.seeds)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        runs = pool.map(_work, tasks, chunksize=1)
    rows = [compared(runs, *each) for each in cells]
    for row in rows:
        print(row)
    print("written to", save("learning", rows))


if __name__ == "__main__":
    main()
