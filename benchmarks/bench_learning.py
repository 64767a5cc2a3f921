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
import torch
from bench_gradients import ARMS, credited
from common import save
from tabular_policy import new_game

START = new_game(5, 0.3, step_tokens=10)
TREES, ROLLOUTS, GOAL, MOST = 2, 8, 0.8, 300  # of an update; updates at most
OPTIMIZERS = ("length", "Adam")
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


def learned(cell: tuple[str, str], optimizer: str, seed: int) -> dict[str, Any]:
    """One run: tokens and CPU seconds to the goal; infinite where it was not reached."""
    game, tokens, began = START, 0, time.process_time()
    logits = torch.nn.Parameter(torch.tensor(START.logits))
    ascent = torch.optim.Adam([logits], lr=0.02) if optimizer == "Adam" else torch.optim.SGD([logits], lr=0.3)
    for update in range(MOST):
        trees = ARMS[cell[0]].trees(game, ROLLOUTS, TREES, 1_000 * seed + update)
        tokens += sum(tree.num_sampled_tokens for tree in trees)
        rows = credited([tree.trajectories() for tree in trees], cell[1])
        gradient = np.mean([game.estimate(own) for own in rows], axis=0)
        if optimizer == "length":
            gradient = gradient / max(np.linalg.norm(gradient), 1e-12)
        logits.grad = -torch.tensor(gradient)
        ascent.step()
        game = replace(game, logits=logits.detach().numpy().copy())
        if game.success >= GOAL:
            return {"tokens": tokens, "seconds": time.process_time() - began, "updates": update + 1}
    return {"tokens": np.inf, "seconds": np.inf, "updates": MOST}


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
