"""Curricula at equal generated tokens: held-out reward of a tiny model on a mixture from trivial to impossible tasks.

The model (a Llama of 2 layers, some 100,000 parameters, characters as tokens) starts from random weights and imitates
answers of half of the kinds of tasks for a short while, so that some are nearly solved, some have a small rate of
success, and some are out of reach. Then each curriculum continues from the same weights with GRPO, on the same pool of
items, with the same budget. All tasks and verifiers are reasoning_gym's; questions are shortened to their numbers or
letters. Held-out items have other seeds; kinds with few questions repeat some.

    python benchmarks/bench_curriculum.py [--seeds 5] [--iterations 16] [--trees 16] [--arms uniform gain ...]

The learning rate is that of `--rates` with which `uniform` has the most held-out reward on seed 0; all arms take it on
seeds 1, 2, .... Compared are the mean held-out reward over the budget (area under the curve) and the last one, paired
by seed with `uniform`; intervals are bootstrap over seeds. The self-check of each seed's model is recorded beside them.
"""

import argparse
import contextlib
import io
import re
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import reasoning_gym
import torch
from common import save
from tiny_policy import END, Parts, curve_of, imitate, interval, new_model, new_tokenizer, score

import treewise as tw
from treewise.rl.tasks import TaskItem
from treewise.rl.tasks.protocol import RewardRequest, Split

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "uniform": ("uniform", {}),
    "dynamic": ("dynamic", {}),
    "gain": ("gain", {"force": True}),
    "gain_shuffled": ("gain", {"force": True, "control": True}),
}
POOL = 160
HELD_OUT = 240
TOKENS_PER_TREE = 32  # generated
ROLLOUTS = 8
MAX_NEW_TOKENS = 7
RATES = (5e-4, 1e-3, 2e-3)
CHECK_ITEMS = 64
TEMPLATE = "?{% for message in messages %}{{ message['content'] }}{% endfor %}"
_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@dataclass(frozen=True)
class Kind:
    """A task of reasoning_gym at one difficulty. mark: begins its questions. is_taught: whether the model imitates it
    before.
    """

    name: str
    task: str
    mark: str
    settings: dict[str, Any]
    is_taught: bool = False

    def short(self, question: str) -> str:
        """The question without its words."""
        body = question.rpartition(":")[2].replace(" ", "").replace("=", "").lower()
        if self.task not in ("chain_sum", "spell_backward"):
            body = ",".join(re.findall(r"\d+", question.replace("1 bits", "")))
        return f"{self.mark}{body}="


KINDS = (
    Kind("sums of two digits", "chain_sum", "s", _DIGITS, is_taught=True),
    Kind("products of two digits", "products", "p", _DIGITS, is_taught=True),
    Kind("words of 3 letters, backward", "spell_backward", "w", {"min_word_len": 3, "max_word_len": 3}, is_taught=True),
    Kind("divisors of numbers to 20", "gcd", "g", {"max_value": 20}, is_taught=True),
    Kind("sums of three digits", "chain_sum", "s", {**_DIGITS, "min_terms": 3, "max_terms": 3}),
    Kind("products of 3-digit numbers", "products", "p", {**_DIGITS, "min_digits": 3, "max_digits": 3}),
    Kind("bits of 30-bit numbers", "count_bits", "b", {}),
    Kind("counts of primes", "count_primes", "c", {}),
)


@cache
def entries(number: int, split: Split) -> Any:
    """The package's items of one kind; other seeds for what is held out."""
    seed = (1 << 29 if split == "held_out" else 0) + (number << 20)
    return reasoning_gym.create_dataset(KINDS[number].task, seed=seed, size=1 << 14, **KINDS[number].settings)


class Mixture:
    """All kinds in turn."""

    name = "mixture"

    def num_items(self, split: Split) -> int | None:
        return HELD_OUT if split == "held_out" else POOL

    def item(self, split: Split, index: int) -> TaskItem:
        number = index % len(KINDS)
        entry = entries(number, split)[index // len(KINDS)]
        prompt = ({"role": "user", "content": KINDS[number].short(entry["question"])},)
        return TaskItem(f"{KINDS[number].name}/{split}/{index}", prompt, {"entry": entry, "kind": number})

    def rewards(self, requests: list[RewardRequest]) -> list[float]:
        found = []
        for request in requests:
            entry = request.item.extra["entry"]
            answer = request.text.strip()
            found.append(float(answer.lower() == str(entry["answer"]).lower()))
        return found


def pretrain(model: Any, tokenizer: Any, seed: int, steps: int) -> None:
    """Imitates the answers of the kinds that are taught, from items beyond the pool."""
    taught = [number for number, kind in enumerate(KINDS) if kind.is_taught]

    def texts(rng: np.random.Generator) -> list[Parts]:
        found: list[Parts] = []
        for number in rng.choice(taught, 64):
            entry = entries(int(number), "train")[int(rng.integers(POOL, 1 << 14))]
            question = "?" + KINDS[number].short(entry["question"])
            found.append([(question, False), (str(entry["answer"]).lower() + END, True)])
        return found

    imitate(model, tokenizer, texts, seed, steps)


def new_trainer(
    model: Any,
    tokenizer: Any,
    folder: Path,
    arm: str,
    args: argparse.Namespace,
    seed: int,
    rate: float,
    task: Any = None,
) -> tw.OnlineTrainer:
    """An online run that leaves the self-check out: it is measured apart. task: in place of `Mixture`."""
    settings = tw.OnlineSettings(
        iterations=args.iterations,
        trees_per_iteration=args.trees,
        tokens_per_iteration=args.trees * TOKENS_PER_TREE,
        max_new_tokens=MAX_NEW_TOKENS,
        branching="none",
        branching_settings={"roots": ROLLOUTS},
        curriculum=ARMS[arm][0],
        curriculum_settings=ARMS[arm][1],
        check_items=0,
        eval_every=args.eval_every,
        eval_items=HELD_OUT,
        save_every=args.iterations,
        chat_template=TEMPLATE,
    )
    arguments = tw.TreeTrainingArguments(
        output_dir=str(folder),
        learning_rate=rate,
        lr_scheduler_type="constant",
        max_tokens=None,
        seed=seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return tw.OnlineTrainer(model, task or Mixture(), tokenizer, settings, arguments)


def run_arm(start: Any, tokenizer: Any, arm: str, args: argparse.Namespace, seed: int, rate: float) -> dict[str, Any]:
    """One arm from the weights that all of a seed begin with."""
    model = new_model(tokenizer, seed)
    model.load_state_dict(start)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = new_trainer(model, tokenizer, Path(folder), arm, args, seed, rate)
        trainer.train()
    tasks = trainer.loop.book.state_dict()["tasks"]
    kinds = {
        kind.name: sum(int(key.rpartition("/")[2]) % len(KINDS) == n for key in tasks) for n, kind in enumerate(KINDS)
    }
    return {
        "arm": arm,
        "seed": seed,
        "curve": curve_of(trainer.log_history),
        "different_items_by_kind": kinds,
        "mean_reward": float(np.mean([entry["reward"] for entry in trainer.log_history if "reward" in entry])),
        "cpu_seconds": time.process_time() - began,
    }


def check_of(start: Any, tokenizer: Any, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The self-check of a seed's model, as a run with `gain` makes it."""
    model = new_model(tokenizer, seed)
    model.load_state_dict(start)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = new_trainer(model, tokenizer, Path(folder), "uniform", args, seed, RATES[0])  # takes no step
        report, _ = trainer.check_items(CHECK_ITEMS, 16)
    return report.to_dict()


def start_of(tokenizer: Any, args: argparse.Namespace, seed: int) -> dict[str, torch.Tensor]:
    """The weights that all arms of a seed begin with."""
    model = new_model(tokenizer, seed)
    pretrain(model, tokenizer, seed, args.pretraining_steps)
    return {name: value.clone() for name, value in model.state_dict().items()}


def chosen_rate(tokenizer: Any, args: argparse.Namespace) -> tuple[float, list[dict[str, Any]]]:
    """The learning rate with which `uniform` has the most reward over the budget on seed 0, and all that were tried."""
    start = start_of(tokenizer, args, 0)
    runs = [{"learning_rate": rate, **run_arm(start, tokenizer, "uniform", args, 0, rate)} for rate in args.rates]
    budget = min(run["curve"][-1][0] for run in runs)
    for run in runs:
        run["mean_held_out"] = score(run["curve"], budget)[0]
        print("rate", run["learning_rate"], round(run["mean_held_out"], 4), flush=True)
    return max(runs, key=lambda run: run["mean_held_out"])["learning_rate"], runs


def compared(runs: list[dict[str, Any]], budget: float) -> list[dict[str, Any]]:
    """Each arm against `uniform`, paired by seed."""
    scores = {(run["arm"], run["seed"]): score(run["curve"], budget) for run in runs}
    seeds = sorted({seed for _, seed in scores})
    table = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = np.array([scores[arm, seed] for seed in seeds])
        base = np.array([scores["uniform", seed] for seed in seeds])
        row: dict[str, Any] = {
            "arm": arm,
            "mean": round(float(own[:, 0].mean()), 4),
            "last": round(float(own[:, 1].mean()), 4),
        }
        if arm != "uniform":
            row |= {
                "mean_minus_uniform": interval(own[:, 0] - base[:, 0]),
                "last_minus_uniform": interval(own[:, 1] - base[:, 1]),
            }
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--trees", type=int, default=16, help="of an iteration, 8 rollouts each")
    parser.add_argument("--eval_every", type=int, default=4, help="iterations between evaluations")
    parser.add_argument("--pretraining_steps", type=int, default=200)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates tried on seed 0")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, runs, checks = new_tokenizer(), [], []
    rate, tried = chosen_rate(tokenizer, args)
    for seed in range(1, args.seeds + 1):
        start = start_of(tokenizer, args, seed)
        checks.append({"seed": seed, "self_check": check_of(start, tokenizer, args, seed)})
        for arm in args.arms:
            runs.append(run_arm(start, tokenizer, arm, args, seed, rate))
            rewards = [round(reward, 3) for _, reward in runs[-1]["curve"]]
            print(arm, seed, rewards, round(runs[-1]["cpu_seconds"], 1), flush=True)
        path = write(runs, checks, rate, tried, args)  # after every seed, so that an interrupted benchmark is not lost
    print("written to", path)


def write(
    runs: list[dict[str, Any]],
    checks: list[dict[str, Any]],
    rate: float,
    tried: list[dict[str, Any]],
    args: argparse.Namespace,
) -> Path:
    """Saves and prints the comparison of the seeds so far."""
    budget = min(run["curve"][-1][0] for run in runs)
    table = compared(runs, budget)
    for row in table:
        print(row, flush=True)
    setting = {"kinds": [kind.name for kind in KINDS], "budget_tokens": budget, **vars(args)}
    setting |= {"learning_rate": rate, "seeds": sorted({run["seed"] for run in runs})}
    return save("curriculum", [{"setting": setting, "table": table}, *tried, *checks, *runs])


if __name__ == "__main__":
    main()
