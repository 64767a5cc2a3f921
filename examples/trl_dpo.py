"""DPO with TRL on trees: moves in the game of 24, promising against hopeless ones.

The pairs come from the searches in examples/data: two first moves for one problem, one of which the search judged
likely to lead to 24. Both answers of a pair share its prompt, and all pairs of a problem do.

    pip install 'trl>=0.20'
    python examples/trl_dpo.py [--model HuggingFaceTB/SmolLM2-135M-Instruct] [--steps 20] [--max_tokens 2048]
"""

import argparse
import gzip
import json
from collections import defaultdict
from pathlib import Path

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import treewise
from treewise.integrations.sharing import Sharing

DATA = Path(__file__).parent / "data" / "searches.jsonl.gz"
LIKELY, HOPELESS = 20.0, 0.01  # values that the search gave to a move


def pairs(most_per_problem: int = 8) -> Dataset:
    """Pairs in TRL's conversational form, the pairs of one problem next to one another."""
    problems = defaultdict(list)
    for line in gzip.decompress(DATA.read_bytes()).splitlines():
        record = json.loads(line)
        if record["group"].startswith("game24"):
            problems[record["group"]].append(record)
    rows = []
    for records in problems.values():
        good = [record["messages"] for record in records if record["reward"] >= LIKELY]
        bad = [record["messages"] for record in records if record["reward"] <= HOPELESS]
        for chosen, rejected in list(zip(good, bad, strict=False))[:most_per_problem]:
            rows.append({"prompt": chosen[:1], "chosen": chosen[1:2], "rejected": rejected[1:2]})
    return Dataset.from_list(rows)


def main(argv: list[str] | None = None) -> Sharing:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="pairs")
    parser.add_argument("--max_tokens", type=int, help="tokens that hold activations at a time, at most")
    parser.add_argument("--output", default="runs/trl_dpo")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args(argv)

    trainer = DPOTrainer(
        model=args.model,
        train_dataset=pairs(),
        args=DPOConfig(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            train_sampling_strategy="sequential",  # pairs of one problem stay together
            learning_rate=1e-6,
            logging_steps=1,
            report_to="none",
            use_cpu=args.cpu,
            bf16=not args.cpu,
        ),
    )
    sharing = treewise.share_prefixes(trainer.model, args.max_tokens)
    if trainer.ref_model is not None:
        treewise.share_prefixes(trainer.ref_model, args.max_tokens)
    trainer.train()
    print(sharing)
    return sharing


if __name__ == "__main__":
    main()
