"""What a checkpoint holds, written and read back: weights, optimizer, schedule, random generators, the loop's state.

Weights and configuration are transformers' own files, so `from_pretrained` reads a checkpoint. Everything else is JSON
and safetensors.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState

from treewise.errors import CheckpointError
from treewise.trainer import checkpoint as seals
from treewise.trainer import ranks, states
from treewise.trainer.shards import load_shards, save_shards

ARGUMENTS = "training_args.json"
STATE = "trainer_state.json"
SHARDS = "weights"  # the folder of a sharded checkpoint's weights


def save(trainer: Any, run_dir: Path, facts: dict[str, Any]) -> Path:
    """Saves the run of a trainer at its present step; every rank calls this. Returns the published checkpoint.

    Raises:
        CheckpointError: on all ranks, if the disk refused on any of them; earlier checkpoints are untouched.
    """
    folder = Path(run_dir) / f".checkpoint-{trainer.state.global_step}.saving"
    num_bytes = checkpoint_bytes(trainer.model, trainer.optimizer)

    def begin() -> None:
        with seals.explained(folder, num_bytes):
            seals.new_folder(run_dir, trainer.state.global_step)

    def write() -> None:
        with seals.explained(folder, num_bytes):
            _write(trainer, folder)

    def finish() -> str:
        with seals.explained(folder, num_bytes):
            return str(seals.publish(folder, facts))

    ranks.on_first_rank(begin)
    ranks.on_every_rank(write)
    return Path(ranks.on_first_rank(finish))


def checkpoint_bytes(model: nn.Module, optimizer: Any) -> int:
    """Bytes of the weights and the optimizer's tensors: nearly all of a checkpoint."""
    tensors: list[torch.Tensor] = list(model.parameters())
    for entry in getattr(optimizer, "state", {}).values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _write(trainer: Any, folder: Path) -> None:
    is_sharded = any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    if is_sharded:
        _write_shards(trainer, folder)
    else:
        trainer.save_model(str(folder), _internal_call=True)
    states.save_random_state(folder, ranks.own())
    if not trainer.args.save_only_model:
        states.save_optimizer(folder, trainer.optimizer, trainer.model, is_sharded)
    if trainer.args.should_save:
        if not trainer.args.save_only_model:
            states.save_schedule(folder, trainer.lr_scheduler)
        _note_callbacks(trainer)
        trainer.state.save_to_json(str(folder / STATE))


def _write_shards(trainer: Any, folder: Path) -> None:
    """What every rank holds of the weights (with adapters: of those that are trained), and what describes the model."""
    has_adapters = hasattr(trainer.model, "peft_config")
    named = trainer.model.named_parameters()
    save_shards(folder / SHARDS, {name: each.data for name, each in named if each.requires_grad or not has_adapters})
    if trainer._shard_settings.whole_checkpoints:
        trainer.save_model(str(folder), _internal_call=True)
    elif trainer.args.should_save:
        for part in trainer.model.peft_config.values() if has_adapters else [trainer.model.config]:
            part.save_pretrained(str(folder))
        trainer._save_beside(folder)


def _note_callbacks(trainer: Any) -> None:
    """Puts the state of the callbacks that have one into the loop's."""
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if not isinstance(callback, ExportableState):
            continue
        name, held = type(callback).__name__, trainer.state.stateful_callbacks
        if isinstance(held.get(name), list):
            held[name].append(callback.state())
        else:
            held[name] = callback.state()


def load_states(trainer: Any, folder: Path) -> None:
    """Optimizer and schedule of a checkpoint.

    Raises:
        CheckpointError: a checkpoint of weights alone, or of another optimizer.
    """
    if not (folder / f"{states.OPTIMIZER}.json").is_file():
        raise CheckpointError(
            f"{folder}: holds a model without its optimizer (save_only_model); start a new run from its weights."
        )
    states.load_optimizer(folder, trainer.optimizer, trainer.model)
    states.load_schedule(folder, trainer.lr_scheduler)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Puts the weights of a checkpoint into a whole model; every parameter, or an error.

    transformers saves some models (mixtures of experts) under other names than their parameters have in memory, and
    its Trainer leaves those as they are when it resumes. Here they are read as `from_pretrained` reads them.

    Raises:
        CheckpointError: parameters that the checkpoint does not hold.
    """
    if (folder / SHARDS).is_dir():
        has_adapters = hasattr(model, "peft_config")
        kept = ((name, each) for name, each in model.named_parameters() if each.requires_grad or not has_adapters)
        load_shards(folder / SHARDS, {name: each.data for name, each in kept})
        return
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise CheckpointError(f"{folder}: a whole checkpoint is loaded before a model is sharded; start a new process.")
    files = sorted(folder.glob("model*.safetensors"))
    wanted = {name: parameter.data for name, parameter in model.named_parameters()}  # a tied parameter has one name
    held: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as stream:
            held |= set(stream.keys())
    if set(wanted) <= held:
        for file in files:
            model.load_state_dict(load_file(file), strict=False)
        return
    missing = _load_converted(model, folder, wanted) if isinstance(model, PreTrainedModel) else sorted(wanted)
    if missing:
        raise CheckpointError(f"{folder}: holds no weights for {', '.join(missing[:5])} ({len(missing)} in all).")


def _load_converted(model: PreTrainedModel, folder: Path, wanted: dict[str, torch.Tensor]) -> list[str]:
    """Reads through `from_pretrained`; returns the names of what it did not find."""
    widest = torch.float32  # wide enough for each parameter, whatever its own dtype: the way back is exact
    for value in wanted.values():
        widest = torch.promote_types(widest, value.dtype) if value.is_floating_point() else widest
    loaded, info = type(model).from_pretrained(folder, dtype=widest, output_loading_info=True, use_safetensors=True)
    found = dict(loaded.named_parameters())
    missing = set(info["missing_keys"]) | {name for name in wanted if name not in found}
    for name, value in wanted.items():
        if name in found:
            value.copy_(found[name].data)
    buffers = dict(loaded.named_buffers())
    for name, buffer in model.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    return sorted(missing & set(wanted))


def fingerprint(model: nn.Module) -> str:
    """What a checkpoint must fit: the model's kind, and the names and shapes of its parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.requires_grad}\n".encode())
    number = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {number:,} parameters ({digest.hexdigest()[:12]})"


def write_arguments(folder: Path, arguments: Any) -> None:
    """The settings beside a saved model, as JSON; transformers would pickle them."""
    (folder / ARGUMENTS).write_text(json.dumps(arguments.to_dict(), indent=1, default=str), encoding="utf-8")
