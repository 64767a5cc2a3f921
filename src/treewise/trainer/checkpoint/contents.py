"""Writes the contents of a checkpoint: weights, optimizer, schedule, random generators, state of the loop. Loads the
states; `weights.py` loads the weights.

Weights and configuration are transformers' own files, so `from_pretrained` reads a checkpoint. Everything else is JSON
and safetensors.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from treewise.distributed import ranks
from treewise.distributed.fsdp import whole_state
from treewise.errors import CheckpointError
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.checkpoint import optimizer_state, store
from treewise.trainer.checkpoint.manifest import listed_files
from treewise.trainer.checkpoint.sharded_io import save_shards
from treewise.trainer.checkpoint.weights import SHARDS, is_sharded_model, sharded_weights

ARGUMENTS = "training_args.json"
STATE = "trainer_state.json"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that a checkpoint is written from.

    loop: transformers' state of the loop, into which the states of callbacks go. exporters: callbacks and the loop's
    control, of which some have a state (`ExportableState`).
    """

    args: TreeTrainingArguments
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loop: TrainerState
    exporters: Sequence[Any] = ()
    tokenizer: Any = None


def save(run: RunState, run_dir: Path, facts: dict[str, Any]) -> Path:
    """Saves a run at its present step; every rank calls this. Returns the published checkpoint.

    A rank that cannot write must not leave the others waiting in a collective operation. So the files are written in
    stages that hold at most one such operation, which reports failures by itself; after each stage either all ranks go
    on or none does.

    Raises:
        CheckpointError: on all ranks, if any of them could not write; earlier checkpoints are untouched.
    """
    folder = Path(run_dir) / f".checkpoint-{run.loop.global_step}.saving"
    num_bytes = checkpoint_bytes(run.model, run.optimizer)

    def explained(stage: Callable[[], T]) -> Callable[[], T]:
        def explain() -> T:
            with store.explained(folder, num_bytes):
                return stage()

        return explain

    try:
        ranks.on_first_rank(explained(lambda: str(store.new_folder(run_dir, run.loop.global_step))))
        for stage in _stages(run, folder):
            ranks.on_every_rank(explained(stage))
        return Path(ranks.on_first_rank(explained(lambda: str(store.publish(folder, facts)))))
    except CheckpointError:
        if ranks.own() == 0:  # all ranks have left the folder
            shutil.rmtree(folder, ignore_errors=True)
        raise


def checkpoint_bytes(model: nn.Module, optimizer: Any) -> int:
    """Bytes of the weights and the optimizer's tensors: nearly all of a checkpoint."""
    tensors: list[torch.Tensor] = list(model.parameters())
    for entry in getattr(optimizer, "state", {}).values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _stages(run: RunState, folder: Path) -> Iterator[Callable[[], object]]:
    """The work of each rank, in order."""
    is_sharded = is_sharded_model(run.model)
    if is_sharded:
        yield lambda: save_shards(folder / SHARDS, sharded_weights(run.model))
    settings = run.args.shard_settings()
    if is_sharded and not (settings and settings.whole_checkpoints):
        yield lambda: _write_configuration(run, folder)
    else:
        state = whole_state(run.model) if is_sharded else None
        yield lambda: write_model(folder, run.model, run.tokenizer, run.args, state)
    if not run.args.save_only_model:
        state_of: list[Any] = []
        yield lambda: state_of.extend(optimizer_state.optimizer_state(run.optimizer, run.model))
        plain, tensors = state_of
        if is_sharded:
            yield lambda: optimizer_state.save_optimizer_shards(folder, tensors)
        yield lambda: optimizer_state.save_optimizer(folder, plain, tensors, is_sharded=is_sharded)
    yield lambda: _write_rest(run, folder)


def save_model(folder: Path, model: Any, tokenizer: Any, args: TreeTrainingArguments) -> None:
    """The model at the end of a run, whole or not at all; every rank calls this.

    Raises:
        CheckpointError: on all ranks, if any of them could not write. Files that were there are untouched.
    """
    state = whole_state(model) if is_sharded_model(model) else None
    num_bytes = sum(each.numel() * each.element_size() for each in sharded_weights(model).values())

    def write() -> None:
        if args.should_save:
            with store.moved_into(folder, num_bytes) as aside:
                write_model(aside, model, tokenizer, args, state)

    ranks.on_every_rank(write)


def write_model(
    folder: Path, model: Any, tokenizer: Any, args: TreeTrainingArguments, state: dict[str, torch.Tensor] | None = None
) -> None:
    """The model as `from_pretrained` reads it, its tokenizer, and the settings of the run.

    state: the gathered weights of a sharded model (`whole_state`).
    """
    if args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder, state_dict=state)
        _write_beside_model(folder, tokenizer, args)


def _write_configuration(run: RunState, folder: Path) -> None:
    """What lies beside the shards of a model."""
    if run.args.should_save:
        model: Any = run.model
        for each in model.peft_config.values() if hasattr(model, "peft_config") else [model.config]:
            each.save_pretrained(str(folder))
        _write_beside_model(folder, run.tokenizer, run.args)


def _write_beside_model(folder: Path, tokenizer: Any, args: TreeTrainingArguments) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    # transformers would pickle the settings.
    (folder / ARGUMENTS).write_text(json.dumps(args.to_dict(), indent=1, default=str), encoding="utf-8")


def _write_rest(run: RunState, folder: Path) -> None:
    """Random generators of every rank; schedule and state of the loop from the first one."""
    optimizer_state.save_random_state(folder, ranks.own())
    if run.args.should_save:
        if not run.args.save_only_model:
            optimizer_state.save_schedule(folder, run.scheduler)
        _export_states(run)
        run.loop.save_to_json(str(folder / STATE))


def _export_states(run: RunState) -> None:
    states = run.loop.stateful_callbacks
    for exporter in run.exporters:
        if not isinstance(exporter, ExportableState):
            continue
        name = type(exporter).__name__
        if isinstance(states.get(name), list):
            states[name].append(exporter.state())
        else:
            states[name] = exporter.state()


def load_states(checkpoint: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Optimizer and schedule of a checkpoint, with the settings of this run where they differ (`optimizer_state`).

    Raises:
        CheckpointError: a checkpoint of weights alone, of another optimizer, or of another kind of schedule.
    """
    with listed_files(checkpoint) as folder:
        if not (folder / f"{optimizer_state.OPTIMIZER}.json").is_file():
            raise CheckpointError(
                f"{checkpoint}: holds a model without its optimizer (save_only_model); start a new run from its "
                "weights."
            )
        try:
            optimizer_state.load_optimizer(folder, optimizer, model)
            optimizer_state.load_schedule(folder, scheduler, optimizer)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint}: {error}") from error


def load_random_state(checkpoint: Path) -> None:
    """The random generators of this rank, if there was such a rank."""
    with listed_files(checkpoint) as folder:
        optimizer_state.load_random_state(folder, ranks.own())


def fingerprint(model: nn.Module) -> str:
    """Identifies the models that a checkpoint fits: the class, and names and shapes of the parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.requires_grad}\n".encode())
    number = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {number:,} parameters ({digest.hexdigest()[:12]})"
