"""Branching policies and credit at equal generated tokens: how far their gradients are from the exact one.

The policy is a table and its exact gradient is known (tabular_policy.py). Each policy of `rl.branching` grows trees of
one prompt, each method of `rl.update.ADVANTAGES` credits the same trees, and every tree gives one gradient.

    python benchmarks/bench_gradients.py [--repetitions 2000] [--few 300] [--processes 2] [--settings chain ...]

About 30 minutes of CPU. Of a cell with mean m and the exact gradient g, divided by `scale = <m, g> / <g, g>` (a
learning rate takes care of it):

    bias        |m - scale g| / |scale g|, the part of the mean that points elsewhere; what noise adds is taken off
    variance    the variance of one tree's gradient / |scale g|^2, at exactly the budget: times tokens / budget
    error       bias^2 + variance / 32, the mean squared error of an update of 32 trees / |g|^2
    cosine      of the gradient of 32 trees to g, mean

Intervals of 95 % are bootstrap over trees. A cell is *biased* where the interval of bias^2 lies above 0. A run of some
settings or credits keeps what the result holds of the others.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import RESULTS, hardware, save
from tabular_policy import ExactBook, Game, grown, new_game

from treewise.rl.branching import RolloutTree, branching_named
from treewise.rl.update import ADVANTAGES
from treewise.tree.trajectory import Trajectory

CHUNK = 50  # trees that grow side by side
UPDATE = 32  # trees of an update
DRAWS = 400  # of the bootstrap


@dataclass(frozen=True)
class Setting:
    """success: of the policy. hard: of `new_game`. budget: generated tokens of a tree, in rollouts."""

    steps: int = 7
    success: float = 0.3
    hard: tuple[int, ...] = ()
    budget: int = 8
    is_full: bool = False

    @property
    def game(self) -> Game:
        return new_game(self.steps, self.success, hard=self.hard)


SETTINGS = {
    "chain": Setting(is_full=True),
    "decisive": Setting(hard=(2, 4), is_full=True),
    "chain, success 0.1": Setting(success=0.1),
    "chain, success 0.6": Setting(success=0.6),
    "chain, 3 steps": Setting(steps=3),
    "chain, 12 steps": Setting(steps=12),
    "chain, 4 rollouts": Setting(budget=4),
    "chain, 16 rollouts": Setting(budget=16),
}


@dataclass(frozen=True)
class Arm:
    """A policy of branching. settings: its own. book: what it predicts of success: `new` has not met the prompt,
    `states` is exact in every state.
    """

    branching: str
    settings: dict[str, Any] = field(default_factory=dict)
    turns: bool = False
    candidates: bool = False
    book: str = "new"

    def trees(self, game: Game, budget: int, num_trees: int, seed: int) -> list[RolloutTree]:
        """Trees of one prompt. budget: of each, in rollouts."""
        return grown(
            game,
            branching_named(self.branching, **self.settings),
            num_trees,
            budget * game.num_tokens,
            seed,
            turns=self.turns,
            candidates=self.candidates,
            book=ExactBook(game, of_states=True) if self.book == "states" else None,
        )


VARIED = {"roots": 2, "variations": 5, "per_round": 2}
ARMS = {
    "none": Arm("none", {"roots": 4}),
    "random": Arm("random", VARIED),
    "entropy": Arm("entropy", VARIED),
    "segments": Arm("segments", {"segment_tokens": 4, "width": 12, "first": 2}),
    "turns": Arm("turns", VARIED, turns=True),
    "turns, uncertain": Arm("turns", VARIED | {"order": "uncertain"}, turns=True),
    "lcr": Arm("lcr", VARIED),
    "lcr, candidates": Arm("lcr", VARIED, candidates=True),
    "lcr, exact states": Arm("lcr", VARIED, book="states"),
}
EXTRA = ("turns, uncertain", "lcr, exact states")  # in `chain` and `decisive` only
CREDITS: dict[str, tuple[str, dict[str, Any]]] = {
    "group z-score": ("grpo", {}),
    "leave one out": ("rloo", {}),
    "siblings": ("siblings", {}),
    "siblings, others": ("siblings", {"baseline": "others"}),
    "siblings, elsewhere": ("siblings", {"baseline": "elsewhere"}),
    "TreePO": ("tree_path_mean", {}),
    "Tree-GRPO": ("inter_intra", {}),
    "TreeRL": ("treerl", {}),
    "SPO": ("value_steps", {}),
    "AT2PO": ("node_value", {}),
}


def credited(rows: list[list[Trajectory]], credit: str) -> list[list[Trajectory]]:
    """The trajectories of each tree with advantages."""
    method, settings = CREDITS[credit]
    found = iter(ADVANTAGES[method]([row for own in rows for row in own], **settings).trajectories)
    return [[next(found) for _ in own] for own in rows]


# -- gradients --------------------------------------------------------------------------------------------------------


def gradients(setting: Setting, arm: Arm, num_trees: int, seed: int, credits: list[str]) -> dict[str, Any]:
    """Of some trees: the gradients of each credit ([trees, T * Z * V]), generated tokens, rollouts, and rewards.

    With candidates also those corrected for how first tokens were drawn, as `sampler_correction` does.
    """
    game = setting.game
    trees = arm.trees(game, setting.budget, num_trees, seed)
    rows = [tree.trajectories() for tree in trees]
    weights = [correction(game, own) for own in rows] if arm.candidates else None
    found: dict[str, Any] = {}
    for name in credits:
        items = credited(rows, name)
        found[name] = np.stack([game.estimate(own).ravel() for own in items])
        if weights is not None:
            corrected = [game.estimate(own, each).ravel() for own, each in zip(items, weights, strict=True)]
            found[name, "corrected"] = np.stack(corrected)
    rewards = [np.array([row.reward for row in own]) for own in rows]
    counts = [(tree.num_sampled_tokens, len(own), len(tree.roots)) for tree, own in zip(trees, rows, strict=True)]
    return {"gradients": found, "counts": counts, "rewards": [float(each.mean()) for each in rewards]}


def correction(game: Game, rows: list[Trajectory]) -> np.ndarray:
    """[N, T] probability of each token under the policy over that of its draw: `sampler_correction="truncate"`."""
    ids = np.stack([row.token_ids[1:] for row in rows]).astype(np.int64)
    drawn = np.stack([np.asarray(row.sampler_logprobs)[1:] for row in rows])
    policy = game.logprobs[np.arange(game.num_tokens), game.states(ids)[:, :-1], ids]
    return np.exp(policy - drawn).clip(max=2.0)


def _work(task: tuple[str, str, int, int, list[str]]) -> dict[str, Any]:
    setting, arm, num_trees, seed, credits = task
    started = time.process_time()
    return gradients(SETTINGS[setting], ARMS[arm], num_trees, seed, credits) | {
        "seconds": time.process_time() - started
    }


def collected(pool: Any, setting: str, arm: str, repetitions: int, credits: list[str]) -> dict[str, Any]:
    """`gradients` of many trees, by all processes."""
    starts = range(0, repetitions, CHUNK)
    tasks = [
        (setting, arm, min(CHUNK, repetitions - start), 1000 + number, credits) for number, start in enumerate(starts)
    ]
    parts = list(pool.imap(_work, tasks))
    return {
        "gradients": {
            name: np.concatenate([each["gradients"][name] for each in parts]) for name in parts[0]["gradients"]
        },
        "counts": np.array([count for each in parts for count in each["counts"]], dtype=np.float64),
        "rewards": np.array([reward for each in parts for reward in each["rewards"]]),
        "seconds": sum(each["seconds"] for each in parts),
    }


# -- against the exact gradient ---------------------------------------------------------------------------------------


def compared(estimates: np.ndarray, exact: np.ndarray, tokens_over_budget: float) -> dict[str, Any]:
    """Figures of one cell, each as [figure, low, high].

    estimates: [trees, P]. exact: [P].
    """
    rng = np.random.default_rng(0)
    total = len(estimates)
    drawn = np.concatenate([np.ones((1, total)), rng.multinomial(total, np.full(total, 1 / total), DRAWS)]) / total
    mean, squared = drawn @ estimates, drawn @ (estimates**2).sum(1)
    length = exact @ exact
    scale = mean @ exact / length
    noise = (squared - (mean**2).sum(1)) / (total - 1) * total
    off = (mean**2).sum(1) - scale**2 * length
    # The mean of n trees has the noise of a tree over n in it, a drawn one twice; all of it but one direction is off.
    along = drawn @ (estimates @ exact) ** 2 / length - (scale**2) * length
    times = np.array([1.0, *[2.0] * DRAWS])
    bias = (off - times * (noise - along) / total) / (scale**2 * length)
    variance = noise / (scale**2 * length) * tokens_over_budget
    error = bias.clip(min=0) + variance / UPDATE
    updates = estimates[: total // UPDATE * UPDATE].reshape(-1, UPDATE, len(exact)).mean(1)
    cosines = updates @ exact / np.linalg.norm(updates, axis=1).clip(min=1e-12) / np.sqrt(length)
    spread = 1.96 * cosines.std(ddof=1) / np.sqrt(len(cosines))
    low, high = np.quantile(bias[1:], [0.025, 0.975])
    return {
        "scale": interval(scale),
        "bias": [round(float(np.sqrt(max(each, 0.0))), 4) for each in (bias[0], low, high)],
        "is_biased": bool(low > 0),
        "variance": interval(variance),
        "error": interval(error),
        "cosine": [round(float(cosines.mean() + sign * spread), 4) for sign in (0, -1, 1)],
    }


def interval(values: np.ndarray) -> list[float]:
    """The figure, which stands first, and the bootstrap interval of the others."""
    return [round(float(each), 4) for each in (values[0], *np.quantile(values[1:], [0.025, 0.975]))]


def scales_of_steps(estimates: np.ndarray, game: Game) -> list[float]:
    """`scale` of the parameters of each step alone: an unbiased estimate has one for all."""
    mean, exact = estimates.mean(0), game.gradient().ravel()
    size = len(exact) // (game.num_tokens // game.step_tokens)
    parts = [slice(start, start + size) for start in range(0, len(exact), size)]
    return [round(float(mean[part] @ exact[part] / (exact[part] @ exact[part])), 3) for part in parts]


def cells(
    pool: Any, name: str, arms: list[str], repetitions: int, credits: list[str]
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Every cell of a setting, with its gradients."""
    setting, game = SETTINGS[name], SETTINGS[name].game
    exact = game.gradient().ravel()
    for arm in arms:
        found = collected(pool, name, arm, repetitions, credits)
        tokens, rollouts, roots = found["counts"].mean(0)
        budget = setting.budget * game.num_tokens
        for key, estimates in found["gradients"].items():
            credit, is_corrected = (key[0], True) if isinstance(key, tuple) else (key, False)
            yield (
                {
                    "setting": name,
                    "branching": arm + (", corrected" if is_corrected else ""),
                    "credit": credit,
                    "repetitions": len(estimates),
                    "tokens": round(float(tokens), 1),
                    "budget": budget,
                    "rollouts": round(float(rollouts), 2),
                    "roots": round(float(roots), 2),
                    "mean_reward": round(float(found["rewards"].mean()), 4),
                    **compared(estimates, exact, tokens / budget),
                    "scales_of_steps": scales_of_steps(estimates, game),
                    "cpu_seconds": round(found["seconds"], 1),
                },
                estimates,
            )


def mixed(kept: dict[tuple[str, str, str], np.ndarray], names: list[str]) -> Iterator[dict[str, Any]]:
    """Cells of prompts of different success side by side, as one gradient: a credit may scale one unlike the other."""
    counts = Counter((branching, credit) for _, branching, credit in kept)
    arms = [cell for cell, count in counts.items() if count == len(names)]
    exact = np.concatenate([SETTINGS[name].game.gradient().ravel() for name in names])
    for branching, credit in arms:
        parts = [kept[name, branching, credit] for name in names]
        size = min(map(len, parts))
        both = np.concatenate([part[:size] for part in parts], axis=1)
        facts = {"setting": "both prompts", "branching": branching, "credit": credit, "repetitions": size}
        yield facts | compared(both, exact, 1.0)


def saved_rows() -> list[dict[str, Any]]:
    """The cells of the result on this hardware."""
    path = RESULTS / f"gradients-{hardware()}.json"
    return (
        [row for row in json.loads(path.read_text())["rows"] if row.get("credit") in CREDITS] if path.is_file() else []
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=2000, help="trees of each cell in `chain` and `decisive`")
    parser.add_argument("--few", type=int, default=300, help="trees of each cell in the other settings")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--credits", nargs="+", default=list(CREDITS), choices=list(CREDITS))
    args = parser.parse_args()
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    kept: dict[tuple[str, str, str], np.ndarray] = {}
    prompts = ["chain, success 0.1", "chain, success 0.6"]
    facts: dict[str, Any] = {"settings": {name: vars(each) for name, each in SETTINGS.items()}, "update": UPDATE}
    facts["arms"] = {name: vars(ARMS[name]) for name in args.arms}
    new = (*args.settings, "both prompts")
    earlier = [row for row in saved_rows() if row["setting"] not in new or row["credit"] not in args.credits]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for name in args.settings:
            is_full = SETTINGS[name].is_full
            arms = [arm for arm in args.arms if is_full or arm not in EXTRA]
            repetitions = args.repetitions if is_full else args.few
            for row, estimates in cells(pool, name, arms, repetitions, args.credits):
                rows.append(row)
                if name in prompts:
                    kept[name, row["branching"], row["credit"]] = estimates
                shown = {key: row[key] for key in ("bias", "is_biased", "variance", "error", "cosine")}
                print(name, "|", row["branching"], "|", row["credit"], shown, flush=True)
            facts["seconds"] = round(time.perf_counter() - started)
            path = save("gradients", [facts, *earlier, *rows])  # after every setting, lest an interruption lose it
    if set(prompts) <= set(args.settings):
        path = save("gradients", [facts, *earlier, *rows, *mixed(kept, prompts)])
    print("written to", path)


if __name__ == "__main__":
    main()
