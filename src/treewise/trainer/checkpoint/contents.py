"""What a checkpoint holds, written and read back: weights, optimizer, schedule, random generators, the loop's state.

Weights and configuration are transformers' own files, so `from_pretrained` reads a checkpoint. Everything else is JSON
and safetensors.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState

from treewise.distributed import ranks
from treewise.distributed.fsdp import whole_state
from treewise.errors import CheckpointError
from treewise.trainer.checkpoint import optimizer_state
from treewise.trainer.checkpoint import store as seals
from treewise.trainer.checkpoint.sharded_io import load_shards, save_shards

ARGUMENTS = "training_args.json"
STATE = "trainer_state.json"
SHARDS = "weights"  # the folder of a sharded checkpoint's weights

T = TypeVar("T")


def save(trainer: Any, run_dir: Path, facts: dict[str, Any]) -> Path:
    """Saves the run of a trainer at its present step; every rank calls this. Returns the published checkpoint.

    A rank that the disk refuses must not leave the others alone in a collective operation. So the writing goes in
    stages that hold one such operation, which tells of failures itself, or none; after each, all go on or none does.

    Raises:
        CheckpointError: on all ranks, if the disk refused on any of them; earlier checkpoints are untouched.
    """
    folder = Path(run_dir) / f".checkpoint-{trainer.state.global_step}.saving"
    num_bytes = checkpoint_bytes(trainer.model, trainer.optimizer)

    def explained(stage: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            with seals.explained(folder, num_bytes):
                return stage()

        return run

    try:
        ranks.on_first_rank(explained(lambda: str(seals.new_folder(run_dir, trainer.state.global_step))))
        for stage in _stages(trainer, folder):
            ranks.on_every_rank(explained(stage))
        return Path(ranks.on_first_rank(explained(lambda: str(seals.publish(folder, facts)))))
    except CheckpointError:
        if ranks.own() == 0:  # all ranks are here, so nobody writes into it any more
            shutil.rmtree(folder, ignore_errors=True)
        raise


def checkpoint_bytes(model: nn.Module, optimizer: Any) -> int:
    """Bytes of the weights and the optimizer's tensors: nearly all of a checkpoint."""
    tensors: list[torch.Tensor] = list(model.parameters())
    for entry in getattr(optimizer, "state", {}).values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _stages(trainer: Any, folder: Path) -> Iterator[Callable[[], object]]:
    """What each rank does, one after the other."""
    is_sharded = any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    if is_sharded:
        yield lambda: save_shards(folder / SHARDS, _kept_weights(trainer.model))
        if trainer._shard_settings.whole_checkpoints:
            state = whole_state(trainer.model)
            yield lambda: trainer._save(str(folder), state)
        else:
            yield lambda: _describe_model(trainer, folder)
    else:
        yield lambda: trainer.save_model(str(folder), _internal_call=True)
    if not trainer.args.save_only_model:
        held: list[Any] = []
        yield lambda: held.extend(optimizer_state.optimizer_state(trainer.optimizer, trainer.model))
        plain, tensors = held
        if is_sharded:
            yield lambda: optimizer_state.save_optimizer_shards(folder, tensors)
        yield lambda: optimizer_state.save_optimizer(folder, plain, tensors, is_sharded)
    yield lambda: _write_rest(trainer, folder)


def _kept_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a sharded checkpoint; with adapters those that are trained."""
    has_adapters = hasattr(model, "peft_config")
    return {name: each.data for name, each in model.named_parameters() if each.requires_grad or not has_adapters}


def _describe_model(trainer: Any, folder: Path) -> None:
    """The configuration beside shards."""
    if trainer.args.should_save:
        has_adapters = hasattr(trainer.model, "peft_config")
        for part in trainer.model.peft_config.values() if has_adapters else [trainer.model.config]:
            part.save_pretrained(str(folder))
        trainer._save_beside(folder)


def _write_rest(trainer: Any, folder: Path) -> None:
    """Random generators of every rank; schedule and the loop's state of all."""
    optimizer_state.save_random_state(folder, ranks.own())
    if trainer.args.should_save:
        if not trainer.args.save_only_model:
            optimizer_state.save_schedule(folder, trainer.lr_scheduler)
        _note_callbacks(trainer)
        trainer.state.save_to_json(str(folder / STATE))


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
    if not (folder / f"{optimizer_state.OPTIMIZER}.json").is_file():
        raise CheckpointError(
            f"{folder}: holds a model without its optimizer (save_only_model); start a new run from its weights."
        )
    optimizer_state.load_optimizer(folder, trainer.optimizer, trainer.model)
    optimizer_state.load_schedule(folder, trainer.lr_scheduler)


def load_weights(model: nn.Module, folder: Path) -> None:
    """Puts the weights of a checkpoint into a whole model; every parameter, or an error.

    transformers saves some models (mixtures of experts) under other names than their parameters have in memory, and
    its Trainer leaves those as they are when it resumes. Here they are read as `from_pretrained` reads them.

    Raises:
        CheckpointError: parameters that the checkpoint does not hold.
    """
    if (folder / SHARDS).is_dir():
        load_shards(folder / SHARDS, _kept_weights(model))
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
