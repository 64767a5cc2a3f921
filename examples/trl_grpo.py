"""GRPO with TRL on trees: sums with a reward that can be checked, sampled by `generate`.

All samples of one prompt share it, and the line below the trainer makes the update compute it once. Losses, metrics and
updates stay those of TRL; take the line out and compare.

    pip install 'trl>=0.20'
    python examples/trl_grpo.py [--model HuggingFaceTB/SmolLM2-135M-Instruct] [--steps 20] [--max_tokens 2048]
"""

import argparse
import random
import re

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import treewise
from treewise.integrations.sharing import Sharing

EXAMPLES = [(3, 4), (12, 5), (20, 31), (7, 9)]


def sums(number: int, seed: int = 0) -> Dataset:
    """Prompts with a few solved examples, so that there is something to share, and their answers."""
    rng = random.Random(seed)
    shown = "\n".join(f"{left} + {right} = {left + right}" for left, right in EXAMPLES)
    rows = []
    for _ in range(number):
        left, right = rng.randint(2, 40), rng.randint(2, 40)
        question = f"Answer with one number.\n{shown}\n{left} + {right} ="
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": left + right})
    return Dataset.from_list(rows)


def is_right(completions, answer, **_):
    """1 for the right sum, 0.1 for some number, 0 for none."""
    rewards = []
    for (message,), right in zip(completions, answer, strict=True):
        numbers = re.findall(r"\d+", message["content"])
        rewards.append(1.0 if numbers and int(numbers[-1]) == right else 0.1 * bool(numbers))
    return rewards


def main(argv: list[str] | None = None) -> Sharing:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--completion", type=int, default=24, help="tokens of a completion, at most")
    parser.add_argument("--max_tokens", type=int, help="tokens that hold activations at a time, at most")
    parser.add_argument("--output", default="runs/trl_grpo")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args(argv)

    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=is_right,
        train_dataset=sums(200),
        args=GRPOConfig(
            output_dir=args.output,
            max_steps=args.steps,
            num_generations=args.generations,
            # One batch holds whole groups: a group that is spread over batches shares nothing between them.
            per_device_train_batch_size=2 * args.generations,
            max_completion_length=args.completion,
            learning_rate=1e-5,
            logging_steps=1,
            report_to="none",
            use_cpu=args.cpu,
            bf16=not args.cpu,
        ),
    )
    sharing = treewise.share_prefixes(trainer.model, args.max_tokens)
    trainer.train()
    print(sharing)
    return sharing


if __name__ == "__main__":
    main()
