"""`treewise train CONFIG.yaml [--key value ...]`: a model, data and settings to a fine-tuned model."""

import argparse
import shlex
from typing import Any

from treewise.cli import run_folder, training_run
from treewise.cli.config import preference_objective, read_config, reference_of
from treewise.cli.keys import TRAIN as KEYS
from treewise.cli.keys import formatter_with, key_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command. Every key of the configuration is a flag, too."""
    parser.usage = (
        "treewise train [CONFIG.yaml] --model MODEL --data FILES --output_dir FOLDER [--key value ...] "
        "[--resume [CHECKPOINT]] [--overwrite] [--dry_run]"
    )
    parser.formatter_class = formatter_with(lambda: key_names(KEYS))
    parser.epilog = "Keys are explained in docs/keys.md; `treewise schema` prints them for editors."
    training_run.add_flags(parser, "output_dir")


def run(args: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    config = read_config(*training_run.split_words(args), KEYS)
    objective = preference_objective(config)
    training_run.check_flags(args, config)
    arguments = training_run.training_arguments(config)
    config = training_run.with_template_date(args, config)
    train_data, eval_data, tokenizer = training_run.load_data(config, read_only=args.dry_run)
    model = training_run.load_model(config, arguments)
    from treewise.nn.wrapped import num_embeddings  # slow to import

    for dataset in (train_data, *([] if eval_data is None else [eval_data])):
        dataset.check_vocabulary(num_embeddings(model))
    from treewise.trainer.inputs import check_preferences
    from treewise.trainer.references import with_references
    from treewise.trainer.run_summary import num_optimizer_steps

    check_preferences(train_data, objective or arguments.sft_objective())
    if args.dry_run:
        return training_run.dry_run(arguments, model, train_data, objective or arguments.sft_objective())
    command = shlex.join(["treewise", "train", *args.overrides])
    num_steps = num_optimizer_steps(arguments, len(train_data))
    with run_folder.opened(args, config, arguments, num_steps) as opened:
        own = (objective, model, reference_of(config), arguments)
        train: Any = with_references(train_data, *own)
        evaluation: Any = with_references(eval_data, *own)
        trainer = {"model": model, "processing_class": tokenizer, "objective": objective}
        training_run.train(arguments, command, opened, train_dataset=train, eval_dataset=evaluation, **trainer)
    return 0
