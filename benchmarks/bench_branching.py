"""Branching policies at equal generated tokens: held-out reward, and how far node values are from the truth.

Two tasks for a tiny policy that half knows them (tiny_policy.py): words of reasoning_gym spelled backward, and guessing
a number in up to five turns. Each arm goes on from the same weights with GRPO and the same budget of generated tokens.

    python benchmarks/bench_branching.py [--seeds 5] [--iterations 6] [--arms none random ...] [--tasks words guess]
    python benchmarks/bench_branching.py --timing        # on an idle machine: seconds of trees against flat sampling

Rewards are compared as the mean over the budget (area under the curve) and at its end, paired by seed; intervals are
bootstrap over seeds. Node values of each arm's trees under the starting weights are held against the mean reward of
many independent rollouts from the same state: the root mean square of the error (the sampling variance of the truth is
taken off) and its mean, the bias.
"""

import argparse
import contextlib
import io
import itertools
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import reasoning_gym
import torch
from common import paired_seconds, save, smollm2, spread
from tiny_policy import END, Parts, curve_of, imitate, interval, new_model, new_tokenizer, score

import treewise as tw
from treewise.rl.branching import PROMPT, Branch
from treewise.rl.node_values import node_values
from treewise.rl.online.collector import GroupRequest, Moment
from treewise.rl.online.continuing import Rounds, continue_all
from treewise.rl.online.growing import GrowingTree, grow_trees
from treewise.rl.online.journal import Journal
from treewise.rl.online.rollout import Continuation
from treewise.rl.samplers import TransformersSampler
from treewise.rl.tasks import EnvironmentTask, GuessNumber, SumTask, TaskItem
from treewise.rl.tasks.protocol import RewardRequest, Split

VARIED = {"roots": 2, "variations": 5, "per_round": 2}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {"roots": 8}),
    "random": ("random", VARIED),
    "entropy": ("entropy", VARIED),
    "lcr": ("lcr", VARIED),
    "lcr without Bayes": ("lcr", VARIED | {"strength": 0.0}),
}
HELD_OUT = 128
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}" + END + "{% endif %}{% endfor %}"
)
VALUE_TREES, VALUE_FORKS = 12, 16
PROMPT_ROLLOUTS, FORK_ROLLOUTS = 96, 48  # of the truth
ESTIMATORS = ("draws", "leaves")


class Backward:
    """Words of 5 to 7 letters, spelled backward; the reward is 1 for all letters right. A fifth is held out."""

    name = "words"

    def num_items(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        word = words(split)[index % len(words(split))]
        prompt = ({"role": "user", "content": f"w{word}="},)
        return TaskItem(f"{self.name}/{split}/{index}", prompt, {"answer": word[::-1]})

    def rewards(self, requests: list[RewardRequest]) -> list[float]:
        return [float(request.text == request.item.extra["answer"]) for request in requests]


@cache
def words(split: Split) -> list[str]:
    """The words of a split, each once."""
    entries = reasoning_gym.create_dataset("spell_backward", seed=0, size=1 << 14, min_word_len=5, max_word_len=7)
    found = dict.fromkeys(entry["metadata"]["word"].lower() for entry in entries)
    return [word for word in found if word.isalpha() and (zlib.crc32(word.encode()) % 5 == 0) == (split == "held_out")]


class Guess(GuessNumber):
    """A number from 1 to 16 in five tries, with answers of one character. Fewer tries, more reward."""

    def reset(self, seed: int = 0) -> None:
        """Draws a number from the seed."""
        super().reset(seed)

    def guess(self, number: str) -> str:
        """Guesses the number.

        Args:
            number: The guess, a whole number.
        """
        return {"higher": "+", "lower": "-", "correct": "="}.get(super().guess(number), "?")


def texts_of_words(rng: np.random.Generator) -> list[Parts]:
    """Words and their answers."""
    chosen = [words("train")[int(i)] for i in rng.integers(0, len(words("train")), 64)]
    return [[(f"w{word}=", False), (word[::-1] + END, True)] for word in chosen]


def texts_of_games(rng: np.random.Generator) -> list[Parts]:
    """Games of a player that heeds the answers at four guesses of ten."""
    games: list[Parts] = []
    for _ in range(64):
        secret, low, high = int(rng.integers(1, 17)), 1, 16
        parts = [("g", False)]
        for _ in range(5):
            heeds = rng.random() < 0.4
            number = int(rng.integers(low, high + 1)) if heeds else int(rng.integers(1, 17))
            parts.append((f"{number}{END}", True))
            if number == secret:
                break
            parts.append(("+" if number < secret else "-", False))
            low, high = (max(low, number + 1), high) if number < secret else (low, min(high, number - 1))
        games.append(parts)
    return games


@dataclass(frozen=True)
class Setting:
    """A task of the benchmark. trees: of an iteration, from twice as many items, so that the book of successes has met
    most of them. tokens: generated, of a tree. steps: of imitation before.
    """

    task: Callable[[], Any]
    texts: Callable[[np.random.Generator], list[Parts]]
    trees: int
    tokens: int
    max_new_tokens: int
    steps: int


SETTINGS = {
    "words": Setting(Backward, texts_of_words, trees=32, tokens=64, max_new_tokens=9, steps=150),
    "guess": Setting(
        lambda: EnvironmentTask(Guess, name="guess", prompt="g", max_turns=5, text_tool="guess"),
        texts_of_games,
        trees=16,
        tokens=64,
        max_new_tokens=20,
        steps=150,
    ),
}


# -- reward over tokens -----------------------------------------------------------------------------------------------


def new_trainer(
    start: Any, tokenizer: Any, folder: Path, name: str, arm: str, args: argparse.Namespace, seed: int
) -> tw.OnlineTrainer:
    """A run of one arm from given weights."""
    setting, (branching, options) = SETTINGS[name], ARMS[arm]
    model = new_model(tokenizer, seed)
    model.load_state_dict(start)
    settings = tw.OnlineSettings(
        iterations=args.iterations,
        trees_per_iteration=setting.trees,
        num_items=2 * setting.trees,
        tokens_per_iteration=setting.trees * setting.tokens,
        max_new_tokens=setting.max_new_tokens,
        mini_batches=4,
        branching=branching,
        branching_settings=options,
        eval_every=args.eval_every,
        eval_items=HELD_OUT,
        eval_temperature=1.0,
        save_every=args.iterations,
        chat_template=TEMPLATE,
    )
    arguments = tw.TreeTrainingArguments(
        output_dir=str(folder),
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=6,
        max_tokens=None,
        seed=seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    sampler = TransformersSampler(model, max_rows=256)
    return tw.OnlineTrainer(model, setting.task(), tokenizer, settings, arguments, sampler=sampler)


def run_arm(start: Any, tokenizer: Any, name: str, arm: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One arm of one task and seed."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = new_trainer(start, tokenizer, Path(folder), name, arm, args, seed)
        trainer.train()
    entries = [entry for entry in trainer.log_history if "sampled_tokens" in entry]
    assert all(entry["sampled_tokens"] == entry["trained_tokens"] for entry in entries)
    return {
        "task": name,
        "arm": arm,
        "seed": seed,
        "curve": curve_of(trainer.log_history),
        "share_ratio": float(np.mean([entry["share_ratio"] for entry in entries])),
        "num_rollouts": sum(entry["num_rollouts"] for entry in entries),
        "branch_depth": float(np.mean([entry.get("branch_depth", 0.0) for entry in entries])),
        "cpu_seconds": time.process_time() - began,
    }


# -- node values against the truth ------------------------------------------------------------------------------------


def rounds_of(trainer: tw.OnlineTrainer) -> Rounds:
    """How the trees of a run grow before its first iteration."""
    moment = Moment("here", trainer.loop, Journal(None), trainer.sampler, 0)
    return trainer.collector.rounds(moment)  # type: ignore[attr-defined, no-any-return]


def new_trees(trainer: tw.OnlineTrainer, stream: tuple[int, ...], count: int, budget: int) -> list[GrowingTree]:
    """Trees of the first items."""
    items = [trainer.task.item("train", index) for index in range(count)]
    named = [GroupRequest(i, item, item.key, budget, (*stream, i)) for i, item in enumerate(items)]
    return trainer.collector.new_trees(named)  # type: ignore[attr-defined, no-any-return]


def grown(trainer: tw.OnlineTrainer, name: str, rounds: Rounds) -> list[GrowingTree]:
    """Trees of the first items, as an iteration grows them, one budget each."""
    trees = new_trees(trainer, (0, 7), VALUE_TREES, SETTINGS[name].tokens)
    grow_trees(trees, rounds)
    return trees


def truth(states: Sequence[tuple[GrowingTree, int, int]], rollouts: int, rounds: Rounds) -> np.ndarray:
    """[states, rollouts] rewards of independent rollouts from (tree, node, position)."""
    started = []
    for number, (each, node, position) in enumerate(states):
        source = each.first if node == PROMPT else each.conversations[node]
        num_tokens = len(each.tree.prefix_ids(node, position))
        for index in range(rollouts):
            branch, seed = Branch(node, position), (11, number, index)
            started.append(Continuation(each.tree, branch, source.branch(num_tokens), rounds.limits, seed))
    continue_all(started, rounds)
    return np.array([each.outcome for each in started], dtype=np.float64).reshape(-1, rollouts)


def values_of(trees: Sequence[GrowingTree], estimator: str) -> dict[tuple[int, int, int], float]:
    """The values of prompts and of forks, by (tree, node, position): means over draws, or over all rollouts below."""
    found = {}
    for number, each in enumerate(trees):
        for value in node_values(each.tree):
            if value.value is not None and (value.node == PROMPT or value.num_draws > 1):
                key = number, value.node, value.end
                found[key] = value.value if estimator == "draws" else mean_of_leaves(each, value.node, value.end)
    return found


def mean_of_leaves(grown: GrowingTree, node: int, end: int) -> float:
    """The mean reward of all rollouts through a place."""
    tree = grown.tree
    ends = {leaf: dict(tree.path_parts(leaf)) for leaf in tree.rewarded_leaves}
    below = [leaf for leaf, own in ends.items() if node == PROMPT or own.get(node, 0) >= end]
    return float(np.mean([tree[leaf].reward for leaf in below]))


def error_of(values: np.ndarray, rewards: np.ndarray) -> dict[str, float]:
    """Root mean square and mean of values minus means, the variance of the means taken off."""
    gaps = values - rewards.mean(1)
    noise = rewards.var(1, ddof=1) / rewards.shape[1]
    return {
        "error": round(float(np.sqrt(max(np.mean(gaps**2 - noise), 0.0))), 4),
        "bias": round(float(gaps.mean()), 4),
        "states": len(values),
    }


def value_errors(start: Any, tokenizer: Any, name: str, args: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Errors of node values of each arm's trees under the starting weights, for prompts and for forks."""
    rows: list[dict[str, Any]] = []
    of_prompts = None
    for arm in args.arms:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = new_trainer(start, tokenizer, Path(folder), name, arm, args, seed)
            trainer.model.eval()
            rounds = rounds_of(trainer)
            trees = grown(trainer, name, rounds)
            rounds = replace(rounds, request=replace(rounds.request, want_entropy=False))
            if of_prompts is None:  # the same items and weights for every arm
                of_prompts = truth([(each, PROMPT, 0) for each in trees], PROMPT_ROLLOUTS, rounds)
            forks = sorted({key for key in values_of(trees, "draws") if key[1] != PROMPT})
            chosen = np.random.default_rng(seed).permutation(len(forks))[:VALUE_FORKS]
            forks = [forks[int(index)] for index in chosen]
            of_forks = truth([(trees[tree], node, end) for tree, node, end in forks], FORK_ROLLOUTS, rounds)
        for estimator in ESTIMATORS:
            values = values_of(trees, estimator)
            prompts = np.array([values[number, PROMPT, 0] for number in range(len(trees))])
            row = {"task": name, "arm": arm, "seed": seed, "estimator": estimator}
            rows.append(row | {"of": "prompts", **error_of(prompts, of_prompts)})
            if forks:
                rows.append(row | {"of": "forks", **error_of(np.array([values[key] for key in forks]), of_forks)})
    return rows


# -- tables -----------------------------------------------------------------------------------------------------------


def compared(runs: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Each arm of a task, and against `random` and `none`, paired by seed."""
    runs = [run for run in runs if run["task"] == name]
    budget = min(run["curve"][-1][0] for run in runs)
    scores = {(run["arm"], run["seed"]): score(run["curve"], budget) for run in runs}
    seeds = sorted({seed for _, seed in scores})
    table = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = np.array([scores[arm, seed] for seed in seeds])
        mine = [run for run in runs if run["arm"] == arm]
        row: dict[str, Any] = {
            "task": name,
            "arm": arm,
            "budget_tokens": budget,
            "start": interval([run["curve"][0][1] for run in mine]),
            "mean": interval(own[:, 0]),
            "last": interval(own[:, 1]),
            "share_ratio": round(float(np.mean([run["share_ratio"] for run in mine])), 3),
            "rollouts": round(float(np.mean([run["num_rollouts"] for run in mine])), 1),
        }
        for base in ("none", "random"):
            if base != arm and (base, seeds[0]) in scores:
                other = np.array([scores[base, seed] for seed in seeds])
                row[f"mean_minus_{base}"] = interval(own[:, 0] - other[:, 0])
                row[f"last_minus_{base}"] = interval(own[:, 1] - other[:, 1])
        table.append(row)
    return table


def compared_values(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors and biases with intervals over seeds."""
    keys = list(dict.fromkeys((row["task"], row["arm"], row["of"], row["estimator"]) for row in rows))
    table = []
    for key in keys:
        own = [row for row in rows if (row["task"], row["arm"], row["of"], row["estimator"]) == key]
        task, arm, of, estimator = key
        facts = {"task": task, "arm": arm, "of": of, "estimator": estimator}
        errors = {name: interval([row[name] for row in own]) for name in ("error", "bias")}
        table.append(facts | errors | {"states": sum(row["states"] for row in own)})
    return table


def write(runs: list[dict[str, Any]], values: list[dict[str, Any]], args: argparse.Namespace) -> Path:
    """Saves and prints the comparison of the seeds so far."""
    tables = [row for name in dict.fromkeys(run["task"] for run in runs) for row in compared(runs, name)]
    errors = compared_values(values)
    for row in [*tables, *errors]:
        print(row, flush=True)
    setting = {key: value for key, value in vars(args).items() if key != "timing"} | {"arms_settings": ARMS}
    return save("branching", [{"setting": setting, "rewards": tables, "values": errors}, *runs])


# -- seconds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneRound:
    """A rollout, then `count - 1` branches of it at random tokens."""

    count: int
    settings: Any = None

    def next_requests(self, tree: Any, _signals: Any, _budget: int, rng: np.random.Generator) -> list[Branch]:
        if len(tree) == 0:
            return [Branch()]
        return [Branch(0, int(cut)) for cut in rng.integers(1, len(tree[0]), self.count - 1)] if len(tree) == 1 else []


def timing(args: argparse.Namespace) -> Path:
    """SmolLM2-135M, 8 rollouts of equal length for each of 4 sums: sampled and trained as trees, against independent
    ones from `generate` that are trained one by one.
    """
    model, tokenizer = smollm2(torch.float32)
    counts: dict[str, list[int]] = {"trees": [], "flat": []}
    with tempfile.TemporaryDirectory() as folder:
        settings = tw.OnlineSettings(trees_per_iteration=4, max_new_tokens=args.new_tokens)
        arguments = tw.TreeTrainingArguments(output_dir=folder, max_tokens=4096, report_to="none", disable_tqdm=True)
        trainer = tw.OnlineTrainer(model, SumTask(num_terms=4, max_number=99), tokenizer, settings, arguments)
        engine = trainer.engine
        numbers = itertools.count()

        def trees() -> None:
            number = next(numbers)
            rounds = rounds_of(trainer)
            request = replace(rounds.request, stop_ids=())
            rounds = replace(rounds, branching=OneRound(8), request=request)  # type: ignore[arg-type]
            found = new_trees(trainer, (0, number), 4, 1 << 30)
            grow_trees(found, rounds)
            rows = [row for each in found for row in each.tree.trajectories()]
            counts["trees"] = [len(rows), sum(each.num_sampled for each in found)]
            engine.step(tw.Forest.from_trajectories(rows), tw.SFT())
            model.zero_grad()

        def flat() -> None:
            rows: list[torch.Tensor] = []
            model.eval()
            for index in range(4):
                prompt = torch.tensor([trainer.collector.prompt_ids(trainer.task.item("train", index))]).expand(8, -1)
                with torch.no_grad():
                    rows += model.generate(
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        do_sample=True,
                        max_new_tokens=args.new_tokens,
                        min_new_tokens=args.new_tokens,
                    ).unbind()
            model.train()
            counts["flat"] = [len(rows), len(rows) * args.new_tokens]
            for row in rows:
                (model(input_ids=row[None], labels=row[None]).loss / len(rows)).backward()
            model.zero_grad()

        seconds = paired_seconds({"trees": trees, "flat": flat}, args.repetitions)
    rows = [
        {"arm": name, "seconds": spread(found), "rollouts": counts[name][0], "generated_tokens": counts[name][1]}
        for name, found in seconds.items()
    ]
    for row in rows:
        print(row)
    return save("branching-time", [{"new_tokens": args.new_tokens, "repetitions": args.repetitions}, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--eval_every", type=int, default=2, help="iterations between evaluations")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--tasks", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--timing", action="store_true", help="only the seconds of trees against flat sampling")
    parser.add_argument("--new_tokens", type=int, default=64, help="timing: of a rollout")
    parser.add_argument("--repetitions", type=int, default=3, help="timing")
    args = parser.parse_args()
    if args.timing:
        print("written to", timing(args))
        return
    torch.set_num_threads(1)
    tokenizer = new_tokenizer()
    runs: list[dict[str, Any]] = []
    values: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        for name in args.tasks:
            model = new_model(tokenizer, seed)
            imitate(model, tokenizer, SETTINGS[name].texts, seed, SETTINGS[name].steps)
            start = {key: value.clone() for key, value in model.state_dict().items()}
            values += value_errors(start, tokenizer, name, args, seed)
            for arm in args.arms:
                runs.append(run_arm(start, tokenizer, name, arm, args, seed))
                rewards = [round(reward, 3) for _, reward in runs[-1]["curve"]]
                print(name, arm, seed, rewards, round(runs[-1]["cpu_seconds"], 1), flush=True)
        path = write(runs, values, args)  # after every seed, so that an interrupted benchmark is not lost
    print("written to", path)


if __name__ == "__main__":
    main()
