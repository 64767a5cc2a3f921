"""What the commands that train have in common: flags, settings, data, model, the training itself."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewise.base.paths import path_of
from treewise.cli.aliases import as_text
from treewise.cli.config import RunConfig
from treewise.cli.data_arguments import data_tokenizer, told_reading
from treewise.cli.output import is_first_rank
from treewise.cli.run_folder import FINISHED, OpenedFolder, check_folder, recorded_setting, tell_finished
from treewise.data.io.field_checks import printable, shown
from treewise.data.io.options import today_as
from treewise.errors import CheckpointError, ConfigError, StoppedError, TreewiseError, check_choice
from treewise.models.load_model import load_weights, locate
from treewise.nn.adapters import adapted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback

    from treewise.data import Trees
    from treewise.trainer import TreeTrainingArguments


def add_flags(parser: argparse.ArgumentParser, folder: str) -> None:
    """Adds the flags of every command that trains. `folder`: what its help calls the output folder."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        metavar="CHECKPOINT",
        help="go on from a checkpoint, by default the newest complete one",
    )
    parser.add_argument("--overwrite", action="store_true", help=f"remove the run that {folder} holds, and start anew")
    parser.add_argument(
        "--dry_run", action="store_true", help="check everything, print the derived numbers, write nothing"
    )
    parser.set_defaults(overrides=[])


def split_words(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """The configuration's path, if the first word is one, and the flags that are keys of a configuration."""
    words = list(args.overrides)
    path = words.pop(0) if words and not words[0].startswith("--") else None
    return path, words


def check_flags(args: argparse.Namespace, config: RunConfig) -> None:
    """Checks flags before anything is loaded. Raises `ConfigError`."""
    if not sys.stderr.isatty():  # a log file holds lines, not progress bars
        from transformers.utils import logging

        logging.disable_progress_bar()
        config.training.setdefault("disable_tqdm", True)
    if args.resume and args.overwrite:
        raise ConfigError("--resume and --overwrite contradict one another; choose one.")
    if config.renamed and is_first_rank():
        print(as_text(config.renamed))
    locate(config.model, config.gguf_file)  # a path that does not exist is an error before anything is loaded
    folder = str(config.training["output_dir"])
    if not folder.strip():
        raise ConfigError("output_dir is empty; name the folder of the run.")
    if "\0" in folder:
        raise ConfigError(f"output_dir {shown(folder)} holds a null byte, which no path can; correct it.")
    if not args.dry_run and is_first_rank():
        from treewise.trainer.run_context import RunLock

        RunLock(folder).check()  # it is taken once data and model are loaded, and would be refused after minutes
        check_folder(Path(folder), args.resume, args.overwrite, is_online="tasks" in config.more)


def with_template_date(args: argparse.Namespace, config: RunConfig) -> RunConfig:
    """The configuration with the date that chat templates write as today's: the one that is given, else that of the
    run which is resumed, else today's. It is one for all processes, and written into the run's folder.
    """
    from treewise.distributed import ranks

    is_online = "tasks" in config.more
    given = config.more.get("template_date") if is_online else config.render.template_date
    folder = Path(str(config.training["output_dir"]))
    recorded = recorded_setting(folder, "template_date") if args.resume else None
    day = given or ranks.on_first_rank(lambda: recorded or today_as())
    if is_online:
        return replace(config, more={**config.more, "template_date": day})
    return replace(config, render=replace(config.render, template_date=day))


def training_arguments(config: RunConfig) -> "TreeTrainingArguments":
    """The settings of a run. Raises `ConfigError` for a value that is invalid in transformers."""
    from treewise.trainer import TreeTrainingArguments

    try:
        arguments = TreeTrainingArguments(**config.training)
    except (ValueError, TypeError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(" ".join(str(error).split())) from error
    check_settings(arguments)
    return arguments


def check_settings(arguments: "TreeTrainingArguments") -> None:
    """Checks the length of the run, settings that transformers reads late, and packages of optimizer and trackers.

    Raises:
        ConfigError: a run of no steps, a schedule that cannot be made, a package that is missing.
    """
    import torch
    from transformers import Trainer, get_scheduler
    from transformers.integrations import get_reporting_integration_callbacks
    from transformers.utils.logging import get_log_levels_dict

    if arguments.max_steps < -1 or arguments.max_steps == 0:  # with 0 transformers trains one step, at rate 0
        raise ConfigError(f"max_steps is {arguments.max_steps}; give a number of steps, or -1 for no limit.")
    if arguments.max_steps <= 0 and not arguments.num_train_epochs > 0:
        raise ConfigError(f"num_train_epochs is {arguments.num_train_epochs:g}: nothing would be trained.")
    if arguments.ddp_timeout <= 0:
        raise ConfigError(f"ddp_timeout is {arguments.ddp_timeout}; it must be positive, in seconds.")
    metric = arguments.metric_for_best_model
    if metric is not None and metric not in ("loss", "eval_loss"):
        raise ConfigError(f"metric_for_best_model is {metric!r}; an evaluation measures eval_loss alone.")
    if arguments.load_best_model_at_end and arguments.eval_strategy == "no":
        raise ConfigError("load_best_model_at_end needs evaluations; give eval_data or eval_split, and eval_strategy.")
    for name in ("log_level", "log_level_replica"):
        check_choice(name, getattr(arguments, name), [*get_log_levels_dict(), "passive"])
    try:
        for tracker in get_reporting_integration_callbacks(arguments.report_to):
            tracker()  # raises where its package is missing
    except (ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(f"report_to: {' '.join(str(error).split())}") from error
    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ImportError, ValueError, RuntimeError) as error:
        given = f" with optim_args {arguments.optim_args!r}" if arguments.optim_args else ""
        raise ConfigError(f"optim {arguments.optim.value}{given}: {' '.join(str(error).split())}") from error
    schedule, settings = arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs or {}
    try:
        get_scheduler(schedule, torch.optim.SGD([torch.zeros(1)]), 0, 1, scheduler_specific_kwargs=dict(settings))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"lr_scheduler_type {schedule.value} with lr_scheduler_kwargs {settings}: {error}."
        ) from error


def load_data(config: RunConfig, *, read_only: bool = False) -> tuple["Trees", "Trees | None", Any]:
    """Training data, evaluation data and tokenizer (or processor); records that were left out are listed on stderr.

    read_only: neither the cache of rendered data nor a quarantine is written.
    """
    from treewise.data import load_trees, split_for_evaluation

    tokenizer = data_tokenizer(config)
    datasets: list[Trees | None] = []
    for name, paths in (("data", config.data), ("eval_data", config.eval_data)):
        if paths is None:
            datasets.append(None)
            continue
        quarantine = Path("quarantine.jsonl" if name == "data" else f"quarantine_{name}.jsonl")  # a file for each load
        with told_reading(f"reading {name}", tokenizer, config) as advance:
            dataset = load_trees(
                paths,
                tokenizer,
                options=config.render,
                num_workers=config.num_workers,
                progress=advance,
                on_bad_record=config.on_bad_record,
                quarantine_path=quarantine,
                read_only=read_only,
            )
        if is_first_rank():
            _report(name, dataset)
            is_written = config.on_bad_record == "quarantine" and not read_only and bool(dataset.report.dropped)
            if is_written and quarantine.stat().st_size:
                print(f"{name}: bad records, with reasons, are in {quarantine}", file=sys.stderr)
        datasets.append(dataset)
    train_data, eval_data = datasets
    assert train_data is not None
    if config.eval_split is not None:
        train_data, eval_data = split_for_evaluation(train_data, config.eval_split)
    return train_data, eval_data, tokenizer


def _report(name: str, dataset: "Trees", limit: int = 5) -> None:
    """Lists records that were left out and likely mistakes on stderr."""
    report = dataset.report
    if report.unused_keys:
        print(f"{name}: keys that nothing reads: {', '.join(report.unused_key_lines())}", file=sys.stderr)
    for kind, lines in (
        ("left out", report.dropped_lines()),
        ("warning", report.warnings),
    ):
        for line in lines[:limit]:
            print(printable(f"{name}: {kind}: {line}"), file=sys.stderr)
        if len(lines) > limit:
            print(f"{name}: {kind}: {len(lines) - limit} more; see treewise inspect", file=sys.stderr)


def load_model(config: RunConfig, arguments: "TreeTrainingArguments") -> "PreTrainedModel":
    """The model to train, with new adapters where the configuration asks for them."""
    from treewise.distributed.mesh import load_on_mesh

    mesh = None
    if (arguments.tp_size, arguments.ep_size) != (1, 1):
        mesh = partial(load_on_mesh, tp_size=arguments.tp_size, ep_size=arguments.ep_size)
    model = load_weights(config.model, config.gguf_file, config.dtype, bits_of(config), load_on_mesh=mesh)
    return with_adapters(model, config, arguments.seed)


def bits_of(config: RunConfig) -> int | None:
    """Bits of quantised weights below adapters; None for other weights."""
    return 4 if config.load_in_4bit else 8 if config.load_in_8bit else None


def with_adapters(model: "PreTrainedModel", config: RunConfig, seed: int) -> "PreTrainedModel":
    """The model with new adapters where the configuration asks for them, else as it is."""
    if config.lora is None:
        return model
    from transformers import set_seed

    set_seed(seed)  # adapters start from random numbers
    place = path_of(Path(config.model, config.gguf_file or ""))  # as the saved adapters name it
    return adapted(model, config.lora, str(place.resolve()) if place.exists() else config.model)


def dry_run(arguments: "TreeTrainingArguments", model: "PreTrainedModel", dataset: Any, objective: object) -> int:
    """Prints what a run would do; returns the exit code."""
    from treewise.engine.engine import TreeEngine
    from treewise.trainer.run_summary import summarize_run
    from treewise.trainer.survey import survey

    TreeEngine(model, arguments.max_tokens, arguments.attention)
    if is_first_rank():
        print(summarize_run(arguments, dataset, survey(dataset), objective))
    return 0


def train(
    arguments: "TreeTrainingArguments",
    command: str,
    opened: OpenedFolder,
    callbacks: Sequence["TrainerCallback"] = (),
    **trainer_settings: Any,
) -> None:
    """Trains and saves the model; a finished run is compared with these settings, and stays as it is.

    command: what the user typed, for advice. trainer_settings: of `TreeTrainer`.
    """
    import torch
    from transformers import PrinterCallback, ProgressCallback

    from treewise.cli.progress import StepLines
    from treewise.trainer import TreeTrainer

    try:
        trainer = TreeTrainer(args=arguments, **trainer_settings)
    except Exception as error:
        if arguments.push_to_hub and not isinstance(error, TreewiseError):
            raise ConfigError(f"push_to_hub: {' '.join(str(error).split())}") from error
        raise
    for theirs in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(theirs)
    for callback in (StepLines(Path(arguments.output_dir)), *callbacks):
        trainer.add_callback(callback)
    try:
        trainer.train(resume_from_checkpoint=opened.resume_from)
    except StoppedError as error:
        advised = StoppedError(f"{error} Go on with: {command} --resume")
        advised.exit_code = error.exit_code
        raise advised from None
    except KeyboardInterrupt:
        print(f"stopped at step {trainer.state.global_step}; go on with: {command} --resume", file=sys.stderr)
        raise
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"out of memory in step {trainer.state.global_step + 1} with max_tokens={arguments.max_tokens}; "
            "a lower max_tokens gives the same gradients in less memory."
        ) from error
    if opened.finished_steps is not None:
        tell_finished(arguments.output_dir, opened.finished_steps, is_online=False)
        return
    _save_final(trainer, Path(arguments.output_dir), command)
    if is_first_rank():
        print(f"model saved to {arguments.output_dir}")
        if trainer.uploaded is not None:
            print(f"uploaded to {trainer.uploaded.commit_url}")


def _save_final(trainer: Any, folder: Path, command: str) -> None:
    """Saves the model and marks the run as finished.

    Raises:
        CheckpointError: there is no room; says how the model is saved later.
    """
    from treewise.trainer.checkpoint import store

    try:
        trainer.save_model()
        try:
            trainer.save_state()
        except OSError as error:
            (folder / FINISHED).unlink(missing_ok=True)
            raise CheckpointError(f"{folder / FINISHED} could not be written ({error.strerror}).") from error
    except CheckpointError as error:
        saved, step = store.checkpoints(folder), trainer.state.global_step
        if not saved:
            raise CheckpointError(
                f"{error} The run has no checkpoint (save_strategy), so its weights are lost."
            ) from error
        rest = "" if store.step_of(saved[-1]) == step else f", which trains the steps to {step} again"
        advice = "make room" if store.is_for_room(error) else "mend that"
        raise CheckpointError(
            f"{error} The run goes on from {saved[-1].name}: {advice}, then: {command} --resume{rest}"
        ) from error
