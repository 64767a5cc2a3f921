"""Writes and loads the contents of a checkpoint: weights, optimizer, schedule, random generators, state of the loop.

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
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_callback import ExportableState

from treewise.distributed import ranks
from treewise.distributed.fsdp import whole_state
from treewise.errors import CheckpointError
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.checkpoint import optimizer_state, store
from treewise.trainer.checkpoint.sharded_io import load_shards, save_shards

ARGUMENTS = "training_args.json"
STATE = "trainer_state.json"
SHARDS = "weights"  # the folder of a sharded checkpoint's weights

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
    is_sharded = _is_sharded(run.model)
    if is_sharded:
        yield lambda: save_shards(folder / SHARDS, _saved_weights(run.model))
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


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _saved_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights in a sharded checkpoint: all, or with adapters the trained ones."""
    has_adapters = hasattr(model, "peft_config")
    return {name: each.data for name, each in model.named_parameters() if each.requires_grad or not has_adapters}


def write_model(
    folder: Path, model: Any, tokenizer: Any, args: TreeTrainingArguments, state: dict[str, torch.Tensor] | None = None
) -> None:
    """The model as `from_pretrained` reads it, its tokenizer, and the settings of the run.

    state: the weights; None: those of the model, gathered from all ranks where they are sharded.
    """
    if state is None and _is_sharded(model):
        state = whole_state(model)
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


def load_states(folder: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Optimizer and schedule of a checkpoint.

    Raises:
        CheckpointError: a checkpoint of weights alone, or of another optimizer.
    """
    if not (folder / f"{optimizer_state.OPTIMIZER}.json").is_file():
        raise CheckpointError(
            f"{folder}: holds a model without its optimizer (save_only_model); start a new run from its weights."
        )
    optimizer_state.load_optimizer(folder, optimizer, model)
    optimizer_state.load_schedule(folder, scheduler)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Loads the weights of a checkpoint into a model.

    transformers saves some models (mixtures of experts) under other names than their parameters have in memory, and
    its Trainer does not load those when it resumes. Here they are read as `from_pretrained` reads them.

    Raises:
        CheckpointError: a parameter is missing from the checkpoint.
    """
    if (folder / SHARDS).is_dir():
        load_shards(folder / SHARDS, _saved_weights(model))
        return
    if _is_sharded(model):
        raise CheckpointError(f"{folder}: a whole checkpoint is loaded before a model is sharded; start a new process.")
    files = sorted(folder.glob("model*.safetensors"))
    wanted = {name: parameter.data for name, parameter in model.named_parameters()}  # a tied parameter has one name
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as stream:
            names |= set(stream.keys())
    if set(wanted) <= names:
        for file in files:
            model.load_state_dict(load_file(file), strict=False)
        return
    missing = _load_converted(model, folder, wanted) if isinstance(model, PreTrainedModel) else sorted(wanted)
    if missing:
        raise CheckpointError(f"{folder}: holds no weights for {', '.join(missing[:5])} ({len(missing)} in all).")


def _load_converted(model: PreTrainedModel, folder: Path, wanted: dict[str, torch.Tensor]) -> list[str]:
    """Reads through `from_pretrained`; returns the names of missing parameters."""
    widest = torch.float32  # holds the values of every parameter exactly, whatever its own dtype
    for value in wanted.values():
        widest = torch.promote_types(widest, value.dtype) if value.is_floating_point() else widest
    loaded, info = type(model).from_pretrained(folder, dtype=widest, output_loading_info=True, use_safetensors=True)
    parameters = dict(loaded.named_parameters())
    missing = set(info["missing_keys"]) | {name for name in wanted if name not in parameters}
    for name, value in wanted.items():
        if name in parameters:
            value.copy_(parameters[name].data)
    buffers = dict(loaded.named_buffers())
    for name, buffer in model.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    return sorted(missing & set(wanted))


def fingerprint(model: nn.Module) -> str:
    """Identifies the models that a checkpoint fits: the class, and names and shapes of the parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.requires_grad}\n".encode())
    number = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {number:,} parameters ({digest.hexdigest()[:12]})"
