"""Online RL on two CPU cores: SmolLM2-135M learns to count letters from its own rollout trees, in a few minutes.

    make rl
    python examples/online_rl.py [--seed 1] [--branching lcr] [--output runs/online-rl] [--resume]

The task is reasoning_gym's `letter_counting`, with two solved examples in the prompt: the model solves a third of it.
Every figure that is printed is of the run itself; beside the held-out reward stands what the commonest answer alone
would get, which is most of what so small a model learns in so few steps. End it at any moment and start it again with
--resume: it goes on from the tokens that it has. docs/online-rl.md explains the loop.
"""

import argparse
import time
from collections import Counter

import torch

import treewise as tw
from treewise.nn.load_model import load_model
from treewise.rl.tasks import ReasoningGymTask


def main() -> None:
    parser = argparse.ArgumentParser(description="Online RL on counting letters.")
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--output", default="runs/online-rl")
    parser.add_argument("--branching", default="random")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--trees", type=int, default=8, help="of an iteration")
    parser.add_argument("--tokens_per_iteration", type=int, default=192)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--eval_items", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    started = time.perf_counter()
    model, tokenizer = load_model(args.model)
    task = ReasoningGymTask(
        "letter_counting", {"min_words": 2, "max_words": 4}, seed=args.seed, instruction="", solved_examples=2
    )
    trainer = tw.OnlineTrainer(
        model,
        task,
        tokenizer,
        tw.OnlineSettings(
            iterations=args.iterations,
            trees_per_iteration=args.trees,
            tokens_per_iteration=args.tokens_per_iteration,
            max_new_tokens=8,
            branching=args.branching,
            branching_settings={"roots": 8} if args.branching == "none" else {"roots": 8, "variations": 2},
            eval_every=args.iterations // 2,
            eval_items=args.eval_items,
            eval_temperature=1.0,
            save_every=args.iterations,  # the journal loses nothing in between, and a checkpoint is 1.6 GB
        ),
        tw.TreeTrainingArguments(
            output_dir=args.output,
            learning_rate=args.learning_rate,
            lr_scheduler_type="linear",
            max_tokens=2048,
            seed=args.seed,
            report_to="none",
        ),
    )
    num_parameters = sum(each.numel() for each in model.parameters())
    print(f"{task.name} on {torch.get_num_threads()} threads, {num_parameters:,} parameters")
    trainer.train(resume_from_checkpoint=args.resume or None)
    evaluations = [entry for entry in trainer.log_history if "eval_reward" in entry]
    first, last = evaluations[0], evaluations[-1]
    answers = Counter(task.item("held_out", index).extra["answer"] for index in range(args.eval_items))
    answer, count = answers.most_common(1)[0]
    print(
        f"\nheld-out pass@1 {first['eval_pass@1']:.3f} -> {last['eval_pass@1']:.3f}, "
        f"reward {first['eval_reward']:.3f} -> {last['eval_reward']:.3f} ({args.eval_items} items at temperature 1; "
        f"{answer!r} for all of them would get {count / args.eval_items:.3f})\n"
        f"{trainer.state.num_sampled:,} tokens sampled and trained, {time.perf_counter() - started:.0f} s in all"
    )


if __name__ == "__main__":
    main()
