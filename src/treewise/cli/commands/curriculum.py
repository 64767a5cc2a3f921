"""`treewise curriculum DATA_OR_TASKS --model M`: does a curriculum's signal predict anything here?"""

import argparse
import json
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.cli.values import read_mapping
from treewise.nn.load_model import load_tokenizer, load_weights

if TYPE_CHECKING:
    from treewise.rl.curriculum.self_check import CheckReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "source",
        nargs="+",
        metavar="DATA_OR_TASKS",
        help="recorded rollouts or rows, or a task: reasoning_gym:NAME, sum, module:name, rows with --reward_functions",
    )
    parser.add_argument("--model", required=True, help="folder, .gguf file, smollm2-demo, or a name on the Hub")
    parser.add_argument("--gguf_file", help="a GGUF file inside the model's folder")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--items", type=int, default=48, help="tasks or trees of the sample")
    parser.add_argument(
        "--rollouts", type=int, default=16, help="tasks: rollouts of each item; one half predicts the other"
    )
    parser.add_argument("--objective", help="whose gradient is measured: grpo for rewards, else sft")
    parser.add_argument("--advantages", help="how rewards become advantages; the objective's usual where not given")
    parser.add_argument("--success_at", type=float, default=0.5, help="rewards from here on are successes")
    parser.add_argument("--tasks_settings", metavar="YAML", help="tasks: settings of the task: '{max_terms: 3}'")
    parser.add_argument("--reward_functions", nargs="+", help="tasks: module:function of rows")
    parser.add_argument("--num_items", type=int, help="tasks: the pool that the sample is drawn from")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="tasks: of a rollout")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling and scoring")
    parser.add_argument("--chat_template", help="a Jinja template, a file that holds one, or chatml")
    parser.add_argument("--max_tokens", type=int, help="budget of a micro-batch")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and the rollouts")
    parser.add_argument("--json", action="store_true", help="print the correlations as JSON")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    first = args.source[0]
    names_code = ":" in first and not first.startswith("hf:")
    is_task = len(args.source) == 1 and (first == "sum" or names_code or bool(args.reward_functions))
    report = _on_tasks(args) if is_task else _on_data(args)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
        return 0
    print(report.text())
    if report.useless:
        print(f"useless here: {', '.join(report.useless)}; the interval is not above zero.")
    return 0


def _on_tasks(args: argparse.Namespace) -> "CheckReport":
    from treewise.rl.online import OnlineSettings, OnlineTrainer
    from treewise.rl.online.curriculum import check_items
    from treewise.rl.online.tasks_by_name import task_named
    from treewise.trainer import TreeTrainingArguments

    given = read_mapping("--tasks_settings", args.tasks_settings) if args.tasks_settings else {}
    task = task_named(args.source[0], given, args.reward_functions or (), args.seed)
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


def _on_data(args: argparse.Namespace) -> "CheckReport":
    from treewise.data import RenderOptions, load_trees
    from treewise.engine.engine import TreeEngine
    from treewise.objectives.registry import objective_named
    from treewise.rl.curriculum.recorded import check_on_trees
    from treewise.rl.update import own_update

    tokenizer = load_tokenizer(args.model, args.gguf_file, required=False)
    dataset = load_trees(args.source, tokenizer, options=RenderOptions(chat_template=args.chat_template))
    chosen = np.random.default_rng(args.seed).permutation(len(dataset))[: args.items]
    trees = [dataset[int(index)].labelled_trajectories() for index in np.sort(chosen)]
    has_rewards = all(row.reward is not None for tree in trees for row in tree)
    name = args.objective or ("grpo" if has_rewards else "sft")
    objective = objective_named(name)
    model = load_weights(args.model, args.gguf_file, args.dtype)
    dataset.check_vocabulary(model.get_input_embeddings().weight.shape[0])
    engine = TreeEngine(model, args.max_tokens, temperature=args.temperature)

    def prepared(rows: list[Any]) -> list[Any]:
        return own_update([rows], objective, engine, method=args.advantages).trees[0]

    return check_on_trees(trees, engine, objective, prepared, args.success_at)
