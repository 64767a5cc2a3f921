"""What the commands that train have in common: flags, data, model, the run's folder, the training itself."""

import argparse
import dataclasses
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewise.cli.aliases import as_text
from treewise.cli.argument_checks import check_settings
from treewise.cli.config import RunConfig, differences, resolved_text
from treewise.cli.load_model import load_processor, load_weights, locate
from treewise.data.io.printable import printable
from treewise.errors import CheckpointError, ConfigError, StoppedError, TreewiseError

if TYPE_CHECKING:
    from treewise.data import Trees
    from treewise.trainer import TreeTrainingArguments

RESOLVED = "resolved_config.yaml"
FINISHED = "trainer_state.json"  # written into the run's folder when it ends
LOG = "log.jsonl"
KEEP_MEMORY = "TREEWISE_KEEP_FREED_MEMORY"  # 0: freed memory is returned to the system


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
        "--dry_run", "--dry-run", action="store_true", help="check everything, print the derived numbers, write nothing"
    )
    parser.set_defaults(overrides=[])


def split_words(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """The configuration's path, if the first word is one, and the flags that are keys of a configuration."""
    words = list(args.overrides)
    path = words.pop(0) if words and not words[0].startswith("--") else None
    return path, words


def check_flags(args: argparse.Namespace, config: RunConfig) -> None:
    """Checks flags before anything is loaded. Raises `ConfigError`."""
    if not sys.stderr.isatty():
        hide_bars(config)
    if args.resume and args.overwrite:
        raise ConfigError("--resume and --overwrite contradict one another; choose one.")
    if config.renamed and is_first_rank():
        print(as_text(config.renamed))
    locate(config.model, config.gguf_file)  # a path that does not exist is an error before anything is loaded
    if config.lora is not None:
        check_lora(config.lora)


def begin(
    stack: ExitStack, args: argparse.Namespace, config: RunConfig, arguments: "TreeTrainingArguments"
) -> str | bool | None:
    """Locks the run's folder until `stack` closes, prepares it, and returns what to resume from. The first rank acts.

    From now on the process of a run on a CPU keeps the memory that it frees (`KEEP_MEMORY`).

    Raises:
        ConfigError: the folder holds another run, is in use, or cannot be written.
        CheckpointError: no such checkpoint.
    """
    from treewise.distributed import ranks
    from treewise.nn.device import keep_freed_memory
    from treewise.trainer.run_lock import RunLock

    folder = Path(arguments.output_dir)
    if arguments.device.type == "cpu" and os.environ.get(KEEP_MEMORY) != "0":
        keep_freed_memory()  # once models are loaded, which frees what it does not need again

    def prepare() -> str | bool | None:
        stack.enter_context(_leaving_nothing(folder))
        stack.enter_context(RunLock(folder))
        check_folder(folder, args.resume, args.overwrite)  # again: another run may have been faster
        resume_from = resume_point(folder, args.resume)
        _write_resolved(folder, config, arguments, args.overwrite, resume_from is not None)
        return resume_from

    return ranks.on_first_rank(prepare)


@contextmanager
def _leaving_nothing(folder: Path) -> Iterator[None]:
    """Removes the settings of a run that failed before it trained, and its folder if the run created it."""
    was_there = folder.exists()
    is_fresh = not was_there or (folder.is_dir() and not any(folder.iterdir()))
    try:
        yield
    except BaseException:
        if is_fresh and folder.is_dir() and {path.name for path in folder.iterdir()} <= {RESOLVED, LOG}:
            for name in (RESOLVED, LOG):
                (folder / name).unlink(missing_ok=True)
            if not was_there:
                folder.rmdir()
        raise


def training_arguments(config: RunConfig) -> "TreeTrainingArguments":
    """The settings of a run. Raises `ConfigError` for a value that is invalid in transformers."""
    from treewise.trainer import TreeTrainingArguments

    if not str(config.training["output_dir"]).strip():
        raise ConfigError("output_dir is empty; name the folder of the run.")
    try:
        arguments = TreeTrainingArguments(**config.training)
    except (ValueError, TypeError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(error).strip().splitlines()[0]) from error
    check_settings(arguments)
    return arguments


def check_lora(settings: dict[str, Any]) -> None:
    """Raises `ConfigError` for settings that peft does not take together, before data and model are loaded."""
    from peft import LoraConfig

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            LoraConfig(**{"task_type": "CAUSAL_LM", **settings})
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"lora: {' '.join(str(error).split())}") from error


def hide_bars(config: RunConfig) -> None:
    """A log file holds lines, not progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    config.training.setdefault("disable_tqdm", True)


def check_steps_left(arguments: "TreeTrainingArguments", num_trees: int, resume_from: str | bool | None) -> None:
    """Raises `ConfigError` where a finished run is resumed without further steps; a run with further steps is open."""
    from treewise.trainer.checkpoint import store
    from treewise.trainer.run_summary import num_optimizer_steps

    folder = Path(arguments.output_dir)
    if resume_from is None or not (folder / FINISHED).exists():
        return
    newest = store.checkpoints(folder)[-1] if resume_from is True else Path(str(resume_from))
    step, wanted = newest.name.rpartition("-")[2], num_optimizer_steps(arguments, num_trees)
    if step.isdigit() and int(step) >= wanted:
        raise ConfigError(
            f"output_dir {folder} holds a finished run of {int(step):,} steps, and the settings ask for {wanted:,}; "
            "give more --max_steps or --num_train_epochs to train it further."
        )
    if is_first_rank():
        (folder / FINISHED).unlink()  # the run is open again


def load_data(config: RunConfig, *, read_only: bool = False) -> tuple["Trees", "Trees | None", Any]:
    """Training data, evaluation data and tokenizer (or processor); records that were left out are listed on stderr.

    read_only: neither the cache of rendered data nor a quarantine is written.
    """
    from treewise.data import load_trees, split_for_evaluation

    if config.tokenizer is not None:
        tokenizer = load_processor(config.tokenizer)
    else:
        tokenizer = load_processor(config.model, config.gguf_file, required=False)
    datasets: list[Trees | None] = []
    for name, paths in (("data", config.data), ("eval_data", config.eval_data)):
        if paths is None:
            datasets.append(None)
            continue
        dataset = load_trees(
            paths,
            tokenizer,
            options=config.render,
            num_workers=config.num_workers,
            progress=is_first_rank() and sys.stderr.isatty(),
            on_bad_record=config.on_bad_record,  # type: ignore[arg-type]
            read_only=read_only,
        )
        if is_first_rank():
            _report(name, dataset)
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
        ("left out", [f"{location}: {reason}" for location, reason in report.dropped]),
        ("warning", report.warnings),
    ):
        for line in lines[:limit]:
            print(printable(f"{name}: {kind}: {line}"), file=sys.stderr)
        if len(lines) > limit:
            print(f"{name}: {kind}: {len(lines) - limit} more; see treewise inspect", file=sys.stderr)


def load_model(config: RunConfig, arguments: "TreeTrainingArguments") -> Any:
    """The model to train, with new adapters where the configuration asks for them."""
    model = load_weights(
        config.model, config.gguf_file, config.dtype, bits_of(config), mesh=(arguments.tp_size, arguments.ep_size)
    )
    return with_adapters(model, config, arguments.seed)


def bits_of(config: RunConfig) -> int | None:
    """Of quantised weights below adapters; None for others."""
    return 4 if config.load_in_4bit else 8 if config.load_in_8bit else None


def with_adapters(model: Any, config: RunConfig, seed: int) -> Any:
    """The model with new adapters where the configuration asks for them, else as it is."""
    if config.lora is None:
        return model
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import set_seed

    if bits_of(config) is not None:  # norms and embeddings in float32
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)

    set_seed(seed)  # adapters start from random numbers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of peft about transformers
            return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **config.lora}))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"lora: {error}") from error


def dry_run(arguments: "TreeTrainingArguments", model: Any, dataset: Any) -> int:
    """Prints what a run would do; returns the exit code."""
    from treewise.engine.engine import TreeEngine
    from treewise.trainer.data_loader import survey
    from treewise.trainer.run_summary import summarize_run

    TreeEngine(model, arguments.max_tokens, arguments.attention)
    if is_first_rank():
        print(summarize_run(arguments, dataset, survey(dataset)))
    return 0


def train(
    arguments: "TreeTrainingArguments",
    model: Any,
    tokenizer: Any,
    train_data: Any,
    eval_data: "Trees | None",
    resume_from: str | bool | None,
    command: str,
    objective: Any = None,
    callbacks: Any = (),
    tree_order: Any = None,
) -> None:
    """Trains and saves the model. command: what the user typed, for the advice on resuming."""

    import torch

    from treewise.cli.progress import StepLines, replace_printers
    from treewise.trainer import TreeTrainer

    try:
        trainer = TreeTrainer(
            model,
            arguments,
            train_dataset=train_data,
            eval_dataset=eval_data,
            objective=objective,
            tree_order=tree_order,
            processing_class=tokenizer,
        )
    except Exception as error:
        if arguments.push_to_hub and not isinstance(error, TreewiseError):
            raise ConfigError(f"push_to_hub: {' '.join(str(error).split())}") from error
        raise
    replace_printers(trainer, [StepLines(Path(arguments.output_dir)), *callbacks])
    try:
        trainer.train(resume_from_checkpoint=resume_from)
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
    _save_final(trainer, Path(arguments.output_dir), command)
    if is_first_rank():
        print(f"model saved to {arguments.output_dir}")
        if trainer.uploads.commit is not None:
            print(f"uploaded to {trainer.uploads.commit.commit_url}")


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
        raise CheckpointError(
            f"{error} The run goes on from {saved[-1].name}: make room, then: {command} --resume{rest}"
        ) from error


# -- the run's folder -------------------------------------------------------------------------------------------------


def check_folder(folder: Path, resume: str | None, overwrite: bool) -> None:
    """Raises `ConfigError` where the folder holds a run that would be lost."""
    from treewise.trainer.checkpoint import store

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir {folder} is a file.")
    if overwrite:
        return
    saved = store.checkpoints(folder)
    if (folder / FINISHED).exists() and not (resume and saved):
        raise ConfigError(
            f"output_dir {folder} holds a finished run"
            + (", of which no checkpoint was saved" if resume else "")
            + f"; choose another (with --model {folder} to go on from its weights), "
            + ("" if resume else "--resume with more --max_steps or --num_train_epochs to train it further, ")
            + "or --overwrite to train again."
        )
    if saved and not resume:
        raise ConfigError(
            f"output_dir {folder} holds a run up to {saved[-1].name}; choose another, --resume to go on, "
            "or --overwrite to start anew."
        )


def resume_point(folder: Path, resume: str | None) -> str | bool | None:
    """What to resume from: a path, True for the newest complete checkpoint, or None."""
    from treewise.trainer.checkpoint import store

    if resume is None:
        return None
    if resume != "newest":
        if resume.endswith((".yaml", ".yml")):
            raise ConfigError(f"--resume {resume}: CONFIG.yaml comes first, then --resume.")
        if not Path(resume).is_dir():
            raise CheckpointError(f"{resume}: no such checkpoint.")
        return resume
    for line in store.recover(folder):
        print(line, file=sys.stderr)
    if store.checkpoints(folder):
        return True
    print(f"no complete checkpoint in {folder}: starting from step 0")
    return None


def _write_resolved(
    folder: Path, config: RunConfig, arguments: "TreeTrainingArguments", overwrite: bool, is_resumed: bool
) -> None:
    from treewise.trainer.checkpoint import store
    from treewise.trainer.checkpoint.manifest import write_atomically

    resolved = folder / RESOLVED
    try:
        if overwrite:
            store.recover(folder)
            for path in store.checkpoints(folder):
                shutil.rmtree(path)
            for path in (resolved, folder / FINISHED, folder / LOG):
                path.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        text = resolved_text(config, arguments)
        by_trainer = {item.name for item in dataclasses.fields(arguments)}  # it compares them with the checkpoint's
        if is_resumed and resolved.exists():
            for change in differences(resolved.read_text(encoding="utf-8"), text):
                if change.partition(":")[0] not in by_trainer:
                    print(f"changed since this run began: {change}", file=sys.stderr)
        write_atomically(resolved, text)
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be written ({error.strerror}).") from error


def is_first_rank() -> bool:
    """Whether this process prints for the run."""
    return os.environ.get("RANK", "0") == "0"
