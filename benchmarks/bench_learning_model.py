"""Does a language model learn faster with branching and credit? Generated tokens to a held-out success, paired by seed.

The task is a sort in steps: each step writes the whole list once more, with the next item moved to its place. A policy
imitates lists in which a fifth of the moves are wrong, so that it knows how to write a list and half knows which item
is next; then online RL, whose reward is 1 for a list of right steps, else 0. There is one right answer, so the held-out
success is a product of probabilities and known without sampling.

    python benchmarks/bench_learning_model.py [--seeds 15] [--processes 2]         # a Llama of 0.3 million parameters
    python benchmarks/bench_learning_model.py --model smollm2 --seeds 5 --processes 1      # reasoning_gym's numbers

Arms and how they are compared are those of bench_learning.py. Steps are of one length whatever the gradient's (SGD
under a small clipped norm), or AdamW's. Runs that the result holds are not repeated.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_gradients import ARMS, CREDITS
from bench_learning import UNIFORM, compared
from common import RESULTS, hardware, save, smollm2
from tiny_policy import Parts, imitate, new_model, new_tokenizer
from transformers import TrainerCallback

import treewise as tw
from treewise.rl.tasks import RewardRequest, TaskItem
from treewise.rl.tasks.protocol import Split

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SLIP, START = 0.2, 0.15  # wrong moves that are imitated; the success at which imitation ends
ROLLOUTS = 8  # of a tree at equal tokens
CLIP = 1e-3  # of steps of one length: below every gradient's norm
COMPARED: tuple[tuple[str, str], ...] = (
    UNIFORM,
    ("random", "leave one out"),
    ("random", "TreePO"),
    ("lcr", "TreePO"),
)


@dataclass(frozen=True)
class Sort:
    """A sort in steps. lists: item number and split to items in disorder, and those in order. between: items.
    moves: steps of an answer.
    """

    lists: Callable[[Split, int], tuple[list[str], list[str]]]
    between: str
    moves: int
    question: str
    name: str = "sort"

    def num_items(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        items, ordered = self.lists(split, index)
        prompt = ({"role": "user", "content": self.question.format(self.between.join(items))},)
        return TaskItem(f"{self.name}/{split}/{index}", prompt, {"answer": self.steps(items, ordered)})

    def rewards(self, requests: list[RewardRequest]) -> list[float]:
        return [float(request.text == request.item.extra["answer"]) for request in requests]

    def steps(self, items: list[str], ordered: list[str], draw: np.random.Generator | None = None) -> str:
        """The steps, the right ones or with slips."""
        left, done, steps = list(items), [], []
        for _ in range(self.moves):
            best = min(left, key=ordered.index)
            slips = draw is not None and draw.random() < SLIP
            chosen = str(draw.choice([each for each in left if each != best])) if slips else best
            left.remove(chosen)
            done.append(chosen)
            steps.append(self.between.join([*done, *left]))
        return ",".join(steps)

    def texts(self, end: str, count: int, rng: np.random.Generator) -> list[Parts]:
        """What is imitated."""
        rows: list[Parts] = []
        for index in rng.integers(1 << 20, 1 << 30, count).tolist():
            items, ordered = self.lists("train", index)
            question = self.question.format(self.between.join(items))
            rows.append([(question, False), (self.steps(items, ordered, rng) + end, True)])
        return rows


def letters(split: Split, index: int) -> tuple[list[str], list[str]]:
    """Seven different letters."""
    draw = np.random.default_rng([index, split == "held_out"])
    items = [str(each) for each in draw.permutation(list("abcdefghijklmnop"))[:7]]
    return items, sorted(items)


def numbers(split: Split, index: int) -> tuple[list[str], list[str]]:
    """Four different whole numbers below 100, of reasoning_gym, in ascending order."""
    import reasoning_gym

    sizes = {"min_numbers": 4, "max_numbers": 4, "min_value": 1, "max_value": 99, "max_decimals": 0}
    draw = np.random.default_rng([index, split == "held_out"])
    while True:  # until no number stands twice
        seed = int(draw.integers(1 << 32))
        facts = reasoning_gym.create_dataset("number_sorting", seed=seed, size=1, **sizes)[0]["metadata"]
        items = [str(int(float(each))) for each in facts["original_numbers"]]
        if len(set(items)) == len(items):
            return items, sorted(items, key=int)


@dataclass(frozen=True)
class Setting:
    """A policy and what it learns. arms: branching and credit. rates: of AdamW and of steps of one length. goal: of
    held-out success. updates: at most. held_out: items of which the success is the mean. trees: of an update. starts:
    policies to start from; seeds that share one differ in what they draw.
    """

    task: Sort
    policy: Callable[[int], tuple[Any, Any]]
    arms: tuple[tuple[str, str], ...]
    imitation_rate: float
    batch: int
    tokens: int
    rates: dict[str, float]
    goal: float
    updates: int
    held_out: int
    trees: int
    starts: int


def tiny(seed: int) -> tuple[Any, Any]:
    tokenizer = new_tokenizer()
    sizes = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3, "head_dim": 24}
    return new_model(tokenizer, seed, **sizes, max_position_embeddings=96), tokenizer


SETTINGS = {
    "tiny": Setting(
        task=Sort(letters, "", moves=5, question="{}="),
        policy=tiny,
        arms=COMPARED,
        imitation_rate=2e-3,
        batch=64,
        tokens=40,
        rates={"AdamW": 2e-4, "length": 0.05 / CLIP},
        goal=0.6,
        updates=80,
        held_out=256,
        trees=8,
        starts=5,
    ),
    "smollm2": Setting(
        task=Sort(numbers, " ", moves=3, question="Sort: {} ->"),
        policy=lambda seed: smollm2(torch.float32),
        arms=COMPARED[:2],
        imitation_rate=5e-5,
        batch=8,
        tokens=42,
        rates={"AdamW": 2e-5, "length": 0.02 / CLIP},
        goal=0.3,  # of a pilot: at this rate success levels off near 0.37
        updates=12,
        held_out=32,
        trees=4,
        starts=1,
    ),
}


def success(model: Any, tokenizer: Any, task: Sort, count: int) -> float:
    """The mean probability of the right answer, over held-out questions."""
    rows, lengths = [], []
    for index in range(count):
        item = task.item("held_out", index)
        prompt, answer = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (item.prompt[0]["content"], item.extra["answer"] + tokenizer.eos_token)
        )
        rows.append(torch.tensor(prompt + answer))
        lengths.append(len(answer))
    found = []
    with torch.no_grad():
        for at in range(0, count, 32):
            ids = torch.nn.utils.rnn.pad_sequence(rows[at : at + 32], batch_first=True)
            logprobs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
            chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
            for number, row in enumerate(rows[at : at + 32]):
                end = len(row) - 1
                found.append(chosen[number, end - lengths[at + number] : end].sum().exp().item())
    return float(np.mean(found))


def start(name: str, seed: int, folder: str) -> dict[str, torch.Tensor]:
    """The weights from which all arms of a seed go on."""
    setting = SETTINGS[name]
    seed %= setting.starts
    path = Path(folder) / f"{name}-{seed}.pt"
    if not path.is_file():
        model, tokenizer = setting.policy(seed)
        texts = partial(setting.task.texts, tokenizer.eos_token, setting.batch)
        for chunk in range(200):
            imitate(model, tokenizer, texts, 1_000 * seed + chunk, 10, setting.imitation_rate)
            if success(model, tokenizer, setting.task, setting.held_out) >= START:
                break
        else:
            raise RuntimeError(f"seed {seed}: {200 * 10} steps of imitation did not reach success {START}")
        torch.save(model.state_dict(), path)
    weights: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return weights


class Goal(TrainerCallback):
    """Held-out success after each update; ends the run at the goal."""

    def __init__(self, measure: Callable[[], float], goal: float) -> None:
        self.measure, self.goal, self.curve = measure, goal, [measure()]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "iteration" in logs:
            self.curve.append(self.measure())
            control.should_training_stop = self.curve[-1] >= self.goal


def learned(name: str, cell: tuple[str, str], optimizer: str, seed: int, folder: str) -> dict[str, Any]:
    """One run: tokens and CPU seconds to the goal; infinite where it was not reached."""
    setting, (branching, credit) = SETTINGS[name], cell
    model, tokenizer = setting.policy(seed)
    model.load_state_dict(start(name, seed, folder))
    method, method_settings = CREDITS[credit]
    watch = Goal(lambda: success(model, tokenizer, setting.task, setting.held_out), setting.goal)
    of_one_length = {"optim": "sgd", "max_grad_norm": CLIP} if optimizer == "length" else {}
    began = time.process_time()
    with tempfile.TemporaryDirectory() as output, contextlib.redirect_stdout(io.StringIO()):
        trainer = tw.OnlineTrainer(
            model,
            setting.task,
            tokenizer,
            tw.OnlineSettings(
                iterations=setting.updates,
                trees_per_iteration=setting.trees,
                tokens_per_iteration=setting.trees * ROLLOUTS * setting.tokens,
                max_new_tokens=setting.tokens + 4,
                branching=branching,
                branching_settings=ARMS[branching].settings | ({"roots": ROLLOUTS} if branching == "none" else {}),
                advantages=method,
                advantages_settings=method_settings,
                eval_every=0,
                show_every=0,
                save_every=setting.updates,
                chat_template=TEMPLATE,
            ),
            tw.TreeTrainingArguments(
                output_dir=output,
                learning_rate=setting.rates[optimizer],
                lr_scheduler_type="constant",
                max_tokens=None if name == "tiny" else 2048,
                seed=seed,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                **of_one_length,
            ),
            callbacks=[watch],
        )
        trainer.train()
        logs = [each for each in trainer.log_history if "sampled_tokens" in each]
    reached = watch.curve[-1] >= setting.goal
    return {
        "tokens": trainer.loop.num_sampled if reached else np.inf,
        "seconds": time.process_time() - began if reached else np.inf,
        "updates": len(watch.curve) - 1,
        "rollouts": sum(each["num_rollouts"] for each in logs),
        "curve": [round(each, 4) for each in watch.curve],
    }


def _work(task: tuple[str, tuple[str, str], str, int, str]) -> dict[str, Any]:
    if task[0] == "tiny":
        torch.set_num_threads(1)
    name, cell, optimizer, seed, _ = task
    facts = {"model": name, "optimizer": optimizer, "branching": cell[0], "credit": cell[1], "seed": seed}
    return facts | learned(*task)


def saved_runs() -> list[dict[str, Any]]:
    path = RESULTS / f"learning-model-{hardware()}.json"
    return [row for row in json.loads(path.read_text())["rows"] if "seed" in row] if path.is_file() else []


def key(run: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(run[name] for name in ("model", "optimizer", "branching", "credit", "seed"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SETTINGS), default="tiny")
    parser.add_argument("--seeds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--optimizers", nargs="+", choices=("AdamW", "length"), default=["AdamW", "length"])
    parser.add_argument("--folder", default="build/learning", help="for the weights that runs start from")
    args = parser.parse_args()
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    done = {key(run): run for run in saved_runs()}
    tasks = [
        (args.model, cell, optimizer, seed, args.folder)
        for seed in range(args.seeds)
        for optimizer in args.optimizers
        for cell in SETTINGS[args.model].arms
        if (args.model, optimizer, *cell, seed) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for run in pool.imap_unordered(_work, tasks, chunksize=len(SETTINGS[args.model].arms) * len(args.optimizers)):
            done[key(run)] = run
            save("learning-model", sorted(done.values(), key=key))  # lest an interruption lose it
            print({name: value for name, value in run.items() if name != "curve"}, flush=True)
    runs = sorted(done.values(), key=key)
    rows = []
    for model in dict.fromkeys(run["model"] for run in runs):
        for optimizer in ("AdamW", "length"):
            own = [run for run in runs if run["model"] == model and run["optimizer"] == optimizer]
            count = Counter(run["seed"] for run in own)
            arms = SETTINGS[model].arms
            own = [run for run in own if count[run["seed"]] == len(arms)]  # seeds that all arms have ended
            for cell in arms if own else ():
                rows.append({"model": model, **compared(own, optimizer, cell)})
    for row in rows:
        print(row)
    print("written to", save("learning-model", [*rows, *runs]))


if __name__ == "__main__":
    main()
