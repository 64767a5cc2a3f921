"""`treewise curriculum TASKS --model M`: does a curriculum's signal predict anything here?"""

import argparse
import json
import tempfile
from typing import TYPE_CHECKING

from treewise.cli.values import read_mapping
from treewise.nn.load_model import load_tokenizer, load_weights

if TYPE_CHECKING:
    from treewise.rl.curriculum.self_check import CheckReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("tasks", help="reasoning_gym:NAME, sum, module:name, or a file of rows with --reward_functions")
    parser.add_argument("--model", required=True, help="folder, .gguf file, smollm2-demo, or a name on the Hub")
    parser.add_argument("--gguf_file", help="a GGUF file inside the model's folder")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--items", type=int, default=48, help="tasks of the sample")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts of each item; one half predicts the other")
    parser.add_argument("--objective", help="whose gradient is measured: grpo where not given")
    parser.add_argument("--advantages", help="how rewards become advantages; the objective's usual where not given")
    parser.add_argument("--success_at", type=float, default=0.5, help="rewards from here on are successes")
    parser.add_argument("--tasks_settings", metavar="YAML", help="settings of the task: '{max_terms: 3}'")
    parser.add_argument("--reward_functions", nargs="+", help="module:function of rows")
    parser.add_argument("--num_items", type=int, help="the pool that the sample is drawn from")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="of a rollout")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling and scoring")
    parser.add_argument("--chat_template", help="a Jinja template, a file that holds one, or chatml")
    parser.add_argument("--max_tokens", type=int, help="budget of a micro-batch")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and the rollouts")
    parser.add_argument("--json", action="store_true", help="print the correlations as JSON")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    report = _report(args)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
        return 0
    print(report.text())
    return 0


def _report(args: argparse.Namespace) -> "CheckReport":
    from treewise.rl.online import OnlineSettings, OnlineTrainer
    from treewise.rl.online.curriculum import check_items
    from treewise.rl.online.tasks_by_name import task_named
    from treewise.trainer import TreeTrainingArguments

    given = read_mapping("--tasks_settings", args.tasks_settings) if args.tasks_settings else {}
    task = task_named(args.tasks, given, args.reward_functions or (), args.seed)
    objective = args.objective or "grpo"
    settings = OnlineSettings(
        trees_per_iteration=1,
        max_new_tokens=args.max_new_tokens,
        num_items=args.num_items,
        advantages=args.advantages,
        success_at=args.success_at,
        chat_template=args.chat_template,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TreeTrainingArguments(
            output_dir=folder,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
            report_to="none",
            disable_tqdm=True,
        )
        model = load_weights(args.model, args.gguf_file, args.dtype)
        tokenizer = load_tokenizer(args.model, args.gguf_file)
        trainer = OnlineTrainer(model, task, tokenizer, settings, arguments, objective=objective)
        return check_items(trainer, args.items, args.rollouts)[0]
