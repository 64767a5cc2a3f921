"""Both halves of treewise on two CPU cores, in some five minutes: SmolLM2-135M learns to sort letters.

    make rl
    python examples/online_rl.py [--seed 1] [--branching lcr] [--output FOLDER] [--resume]

First a minute of fine-tuning on trees: four recorded tries of each question share its prompt, and six tries of ten are
wrong, so the model learns what an answer looks like and sorts one question in five. Then online RL on what it samples
itself: only the reward (1 for the right order, else 0) says what is right. No constant answer is worth anything here.

Every figure that is printed is of the run itself. Ended at any moment, it goes on with --resume. An earlier run is
never touched: a new one gets a folder of its own. docs/online-rl.md explains the loop.
"""

import argparse
import json
import sys
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from treewise.cli.main import explained, loading

with loading("rl"):
    import numpy as np
    import torch
    from transformers import PrinterCallback, ProgressCallback
    from transformers.utils import logging

    import treewise as tw
    from treewise.bench.results import commit, hardware, processor
    from treewise.cli.progress import StepLines
    from treewise.data import load_trees
    from treewise.errors import duration
    from treewise.models.load_model import load_model
    from treewise.report import read_run
    from treewise.report.html.build import build_data_report
    from treewise.report.html.page import write_page
    from treewise.rl.online.records import rollouts_file
    from treewise.rl.recorder.chat_tokens import ChatTokens
    from treewise.rl.tasks import RewardRequest, TaskItem

LETTERS = "abcdefghij"
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # a template of nothing but the text
WARM_UP_STEPS, WARM_UP_TREES, NUM_TRIES, SLIP = 8, 64, 4, 0.25
FIRST_RECORDED = 1 << 20  # index of the first question of the recorded tries; the loop practises those before it


@dataclass
class SortLetters:
    """Put letters in order. The reward is 1 for the right order, else 0."""

    num_letters: int = 4
    seed: int = 0
    name: str = "sort_letters"

    def num_items(self, split: str) -> int | None:
        """None: items never end. A fifth of all questions is held out, by a hash of their letters."""
        return None

    def item(self, split: str, index: int) -> TaskItem:
        """The same at every call."""
        draw = np.random.default_rng([self.seed, index, split == "held_out"])
        while True:
            letters = [LETTERS[place] for place in draw.permutation(len(LETTERS))[: self.num_letters]]
            if (zlib.crc32("".join(letters).encode()) % 5 == 0) == (split == "held_out"):
                break
        question = {"role": "user", "content": f"Sort: {' '.join(letters)} ->"}
        return TaskItem(f"{self.name}/{split}/{index}", (question,), {"answer": " ".join(sorted(letters))})

    def rewards(self, requests: list[RewardRequest]) -> list[float]:
        """1 for the right letters in the right order and nothing else."""
        return [float(request.text.split() == request.item.extra["answer"].split()) for request in requests]


def recorded_tries(task: SortLetters, index: int) -> list[str]:
    """What somebody's logs may hold: each pick of the next letter goes wrong with probability `SLIP`."""
    draw, answer = np.random.default_rng([task.seed, index]), task.item("train", index).extra["answer"]
    tries = []
    for _ in range(NUM_TRIES):
        left, picked = answer.split(), []
        while left:
            slips = len(left) > 1 and draw.random() < SLIP
            picked.append(left.pop(int(draw.integers(1, len(left))) if slips else 0))
        tries.append(" ".join(picked))
    return tries


def warm_up(model: Any, tokenizer: Any, task: SortLetters, output: Path) -> None:
    """Fine-tuning on trees of recorded tries, which it saves in `output`."""
    chat, trees, num_right = ChatTokens(tokenizer, PLAIN), [], 0
    for index in range(FIRST_RECORDED, FIRST_RECORDED + WARM_UP_STEPS * WARM_UP_TREES):
        item, tries = task.item("train", index), recorded_tries(task, index)
        prompt = list(chat.prompt_ids(item.prompt))
        answers = [[*tokenizer(" " + each).input_ids, tokenizer.eos_token_id] for each in tries]
        trees.append([tw.Trajectory(prompt + own, [0.0] * len(prompt) + [1.0] * len(own)) for own in answers])
        num_right += tries.count(item.extra["answer"])
    num_tries = len(trees) * NUM_TRIES
    print(f"warm-up: {len(trees)} trees of {NUM_TRIES} recorded tries, of which {num_right / num_tries:.0%} are right")
    part = output.with_name(output.name + ".part")
    args = tw.TreeTrainingArguments(
        output_dir=str(part),
        per_device_train_batch_size=WARM_UP_TREES,
        max_steps=WARM_UP_STEPS,
        learning_rate=5e-5,
        lr_scheduler_type="constant",
        max_tokens=2048,
        save_strategy="no",
        seed=task.seed,
        report_to="none",
    )
    part.mkdir(parents=True, exist_ok=True)
    trainer = tw.TreeTrainer(model, args, train_dataset=trees, processing_class=tokenizer, callbacks=[StepLines(part)])
    for printer in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printer)
    trainer.train()
    trainer.save_model()
    part.rename(output)  # whole, or not there


def main() -> int:
    parser = argparse.ArgumentParser(
        description="SmolLM2-135M learns to sort letters: a warm-up on trees, then online RL."
    )
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--output", type=Path, help="folder of the run (runs/online-rl, or runs/online-rl-2, ...)")
    parser.add_argument("--branching", default="none", help="a policy of docs/tree-credit.md")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--eval_items", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="goes on with the run in the folder")
    parser.add_argument("--record", type=Path, help="a JSON file to which the results of this seed are added")
    return explained("rl", partial(run, parser.parse_args()))


def run(args: argparse.Namespace) -> int:
    logging.disable_progress_bar()
    started, task = time.perf_counter(), SortLetters(seed=args.seed)
    output = args.output or free_folder(Path("runs/online-rl"), is_resumed=args.resume)
    print(f"{task.name} on {torch.get_num_threads()} threads, in {output}")
    warm = output / "warm-up"
    is_warm = args.resume and warm.is_dir()
    model, tokenizer = load_model(str(warm) if is_warm else args.model)
    if not is_warm:
        warm_up(model, tokenizer, task, warm)
    seconds_warm_up = time.perf_counter() - started
    trainer = online_trainer(model, tokenizer, task, args, output)
    print(f"online RL: {args.iterations} iterations of 16 questions")
    trainer.train(resume_from_checkpoint=args.resume or None)
    result = {
        "seed": args.seed,
        **figures(trainer, task, args.eval_items),
        "seconds_warm_up": seconds_warm_up,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time(),
    }
    page = write_report(trainer, tokenizer, output)
    show(result, trainer, page)
    if args.record:
        add_record(args.record, result)
    return 0


def free_folder(first: Path, *, is_resumed: bool) -> Path:
    """The first folder that is free, of `first`, `first-2`, ...; to go on, the last that is not."""
    folder, number, last = first, 1, first
    while folder.exists():
        last, number = folder, number + 1
        folder = first.with_name(f"{first.name}-{number}")
    return last if is_resumed else folder


def online_trainer(model: Any, tokenizer: Any, task: SortLetters, args: argparse.Namespace, output: Path) -> Any:
    per_tree = 8
    return tw.OnlineTrainer(
        model,
        task,
        tokenizer,
        tw.OnlineSettings(
            iterations=args.iterations,
            trees_per_iteration=16,
            tokens_per_iteration=16 * per_tree * (task.num_letters + 1),
            max_new_tokens=task.num_letters + 2,
            branching=args.branching,
            branching_settings={"roots": per_tree if args.branching == "none" else per_tree // 2},
            drop_flat_groups=True,
            eval_every=max(1, args.iterations // 3),
            eval_items=args.eval_items,
            eval_temperature=1.0,
            success_at=1.0,
            show_every=max(1, args.iterations // 3),
            save_every=args.iterations,  # the journal loses nothing in between, and a checkpoint is 1.6 GB
            chat_template=PLAIN,
        ),
        tw.TreeTrainingArguments(
            output_dir=str(output),
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            max_tokens=2048,
            seed=args.seed,
            report_to="none",
        ),
    )


# -- what came of it ---------------------------------------------------------------------------------------------------


def figures(trainer: Any, task: SortLetters, num_items: int) -> dict[str, Any]:
    """Held-out success by iteration, beside what the best constant answer gets on the same items."""
    answers = Counter(task.item("held_out", index).extra["answer"] for index in range(num_items))
    answer, count = answers.most_common(1)[0]
    held_out = {int(log["iteration"]): log["eval_pass@1"] for log in trainer.log_history if "eval_pass@1" in log}
    return {
        "held_out_items": num_items,
        "held_out_success": held_out,
        "best_constant_answer": answer,
        "best_constant_success": count / num_items,
        "training_success": [log["success"] for log in trainer.log_history if "success" in log],
        "sampled_tokens": trainer.loop.num_sampled,
    }


def write_report(trainer: Any, tokenizer: Any, output: Path) -> Path:
    """The page: the run with its curves and samples, and the trees of the last iteration, token by token."""
    last = rollouts_file(output, trainer.settings.iterations)
    trees = load_trees(last, tokenizer, num_workers=0)
    data = build_data_report(
        trees, trees.report, sources=[str(last)], tokenizer=tokenizer, tokenizer_name="the model's", num_drawn=6
    )
    return write_page(output / "report.html", data, read_run(output), tw.__version__)[0]


def show_bars(success: list[float | None], held_out: dict[int, float], what: str) -> None:
    """Success of each iteration, and of held-out questions or tasks by the iteration after which they were tried."""
    width = 50
    print(f"\niteration  success of what was sampled for training, | of held-out {what}")
    for iteration, value in enumerate([None, *success]):
        bar = list("█" * round((value or 0.0) * width) + " " * (width + 1 - round((value or 0.0) * width)))
        if iteration in held_out:
            bar[round(held_out[iteration] * width)] = "|"
        shown = "     " if value is None else f"{value:.3f}"
        after = f"{held_out[iteration]:.3f}" if iteration in held_out else ""
        print(f"{iteration:>9}  {shown} {''.join(bar)} {after}")


def show(result: dict[str, Any], trainer: Any, page: Path) -> None:
    """Success of each iteration as bars, and where everything lies."""
    held_out = result["held_out_success"]
    show_bars(result["training_success"], held_out, "questions")
    first, last = held_out[min(held_out)], held_out[max(held_out)]
    print(
        f"\nheld-out success {first:.3f} after the warm-up, {last:.3f} after RL; the best constant answer "
        f"({result['best_constant_answer']}) gets {result['best_constant_success']:.3f} "
        f"({result['held_out_items']} questions at temperature 1)\n"
        f"{result['sampled_tokens']:,} tokens sampled and trained; {duration(result['seconds'])} in all, "
        f"{result['cpu_seconds']:.0f} seconds of CPU\n"
        f"the page, with trees and their text: {page}\n"
        f"every rollout, with its text: {trainer.folder}/rollouts\n"
        "\nnow yours:\n"
        "  treewise rl --tasks rows.jsonl --reward_functions rewards.py:mine --model MODEL --output_dir runs/mine\n"
        "  treewise inspect --run runs/mine --html mine.html"
    )


def add_record(path: Path, result: dict[str, Any]) -> None:
    """Adds the results of a seed to a file, in place of what it held of that seed."""
    rows = json.loads(path.read_text())["seeds"] if path.exists() else []
    rows = [row for row in rows if row["seed"] != result["seed"]] + [result | {"commit": commit()}]
    record = {
        "benchmark": "online RL",
        "command": f"for seed in 0 1 2; do python examples/online_rl.py --seed $seed --record {path}; done",
        "hardware": hardware(),
        "processor": processor(),
        "torch": torch.__version__,
        "seeds": sorted(rows, key=lambda row: row["seed"]),
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
