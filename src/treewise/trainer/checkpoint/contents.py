"""Writes the contents of a checkpoint: weights, optimizer, schedule, random generators, state of the loop. Loads the
states; `weights.py` loads the weights.

Weights and configuration are transformers' own files, so `from_pretrained` reads a checkpoint. Everything else is JSON
and safetensors.
"""

import dataclasses
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
from treewise.distributed.fsdp import copy_of_changing, whole_state
from treewise.distributed.mesh import as_whole_model, mesh_of
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


@dataclass(frozen=True, slots=True)
class Captured:
    """What the files of a checkpoint are written from, on this rank.

    weights: what `save_pretrained` writes; None: the model's own. shards: of a sharded model, else empty. optimizer:
    the result of `optimizer_state`; None where it is not saved. loop: JSON.
    """

    run: RunState
    step: int
    num_bytes: int
    weights: dict[str, torch.Tensor] | None
    shards: dict[str, torch.Tensor]
    optimizer: tuple[Any, dict[str, torch.Tensor]] | None
    schedule: Any
    random: Any
    loop: str


def save(run: RunState, run_dir: Path, facts: dict[str, Any]) -> Path:
    """Saves a run at its present step; every rank calls this. Returns the published checkpoint.

    Raises:
        CheckpointError: on all ranks, if any of them could not write; earlier checkpoints are untouched.
    """
    return write(capture(run, run_dir), run_dir, facts)


def capture(run: RunState, run_dir: Path, *, copies: bool = False) -> Captured:
    """The state of a run at its present step; every rank calls this.

    copies: of all that training changes, in host memory, so that it may go on before they are written.

    Raises:
        CheckpointError: on all ranks, if the state of one cannot be saved.
    """
    has_parts, settings = is_sharded_model(run.model), run.args.shard_settings()
    is_on_mesh = mesh_of(run.model) is not None
    is_sharded = has_parts and not is_on_mesh  # a mesh's checkpoints are whole, so that any other mesh reads them
    is_whole = not is_sharded or bool(settings and settings.whole_checkpoints)
    weights = whole_state(run.model) if is_whole and (has_parts or copies) else None
    num_bytes = checkpoint_bytes(run.model, run.optimizer)

    def kept(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: copy_of_changing(each) for name, each in tensors.items()} if copies else tensors

    def own_part() -> Captured:
        optimizer = None
        if not run.args.save_only_model:
            plain, tensors = optimizer_state.optimizer_state(run.optimizer, run.model)
            if has_parts and is_on_mesh:
                optimizer_state.gather(tensors)
            optimizer = plain, kept(tensors) if is_sharded or ranks.own() == 0 else {}
        _export_states(run)
        return Captured(
            run=run,
            step=run.loop.global_step,
            num_bytes=num_bytes,
            weights=weights,
            shards=kept(sharded_weights(run.model)) if is_sharded else {},
            optimizer=optimizer,
            schedule=None if run.args.save_only_model else optimizer_state.schedule_state(run.scheduler),
            random=optimizer_state.random_state(),
            loop=_as_json(run.loop),
        )

    own: list[Captured] = []
    folder = store.aside(run_dir, run.loop.global_step)
    ranks.on_every_rank(_explained(folder, num_bytes, lambda: own.append(own_part())))
    return own[0]


def write(saved: Captured, run_dir: Path, facts: dict[str, Any], group: Any = None) -> Path:
    """Writes and publishes a checkpoint; every rank calls this. group: as in `ranks.on_every_rank`.

    A rank that cannot write must not leave the others waiting in a collective operation. So the files are written in
    stages that hold at most one such operation, which reports failures by itself; after each stage either all ranks go
    on or none does.

    Raises:
        CheckpointError: on all ranks, if any of them could not write; earlier checkpoints are untouched.
    """
    folder = store.aside(run_dir, saved.step)

    def explained(stage: Callable[[], T]) -> Callable[[], T]:
        return _explained(folder, saved.num_bytes, stage)

    try:
        ranks.on_first_rank(explained(lambda: str(store.new_folder(run_dir, saved.step))), group)
        for stage in _stages(saved, folder, group):
            ranks.on_every_rank(explained(stage), group)
        return Path(ranks.on_first_rank(explained(lambda: str(store.publish(folder, facts))), group))
    except CheckpointError:
        if ranks.own() == 0:  # all ranks have left the folder
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _explained(folder: Path, num_bytes: int, stage: Callable[[], T]) -> Callable[[], T]:
    def explain() -> T:
        with store.explained(folder, num_bytes):
            return stage()

    return explain


def checkpoint_bytes(model: nn.Module, optimizer: Any) -> int:
    """Bytes of the weights and the optimizer's tensors: nearly all of a checkpoint."""
    tensors: list[torch.Tensor] = list(model.parameters())
    for entry in getattr(optimizer, "state", {}).values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _stages(saved: Captured, folder: Path, group: Any) -> Iterator[Callable[[], object]]:
    """The work of each rank, in order."""
    run, is_sharded = saved.run, bool(saved.shards)
    if is_sharded:
        yield lambda: save_shards(folder / SHARDS, saved.shards, group)
    if is_sharded and saved.weights is None:
        yield lambda: _write_configuration(run, folder)
    else:
        yield lambda: write_model(folder, run.model, run.tokenizer, run.args, saved.weights)
    if saved.optimizer is not None:
        plain, tensors = saved.optimizer
        if is_sharded:
            yield lambda: optimizer_state.save_optimizer_shards(folder, tensors, group)
        yield lambda: optimizer_state.save_optimizer(folder, plain, tensors, is_sharded=is_sharded)
    yield lambda: _write_rest(saved, folder)


def save_model(folder: Path, model: Any, tokenizer: Any, args: TreeTrainingArguments) -> list[str]:
    """The model at the end of a run, read back, whole or not at all; every rank calls this. The names of its files.

    Raises:
        CheckpointError: on all ranks, if any of them could not write. Files that were there are untouched.
    """
    state = whole_state(model) if is_sharded_model(model) else None
    num_bytes = sum(each.numel() * each.element_size() for each in sharded_weights(model).values())

    def write_files() -> list[str]:
        if not args.should_save:
            return []
        with store.moved_into(folder, num_bytes) as aside:
            write_model(aside, model, tokenizer, args, state)
            return [path.relative_to(aside).as_posix() for path in sorted(aside.rglob("*")) if path.is_file()]

    return ranks.on_every_rank(write_files)[0]


def write_model(
    folder: Path, model: Any, tokenizer: Any, args: TreeTrainingArguments, state: dict[str, torch.Tensor] | None = None
) -> None:
    """The model as `from_pretrained` reads it, its tokenizer, and the settings of the run.

    state: the gathered weights of a sharded model (`whole_state`).
    """
    if args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
        with as_whole_model(model):
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


def _write_rest(saved: Captured, folder: Path) -> None:
    """Random generators of every rank; schedule and state of the loop from the first one."""
    optimizer_state.save_random_state(folder, ranks.own(), saved.random)
    if saved.run.args.should_save:
        if saved.schedule is not None:
            optimizer_state.save_schedule(folder, saved.schedule)
        (folder / STATE).write_text(saved.loop, encoding="utf-8")


def _as_json(loop: TrainerState) -> str:
    """What `TrainerState.save_to_json` writes."""
    return json.dumps(dataclasses.asdict(loop), indent=2, sort_keys=True) + "\n"


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


def load_initial_optimizer(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """The optimizer's state that a new run begins with; its settings and learning rates stay those of the run.

    Raises:
        CheckpointError: no state in the folder, or one of another optimizer or other parameters.
    """
    if not (folder / f"{optimizer_state.OPTIMIZER}.json").is_file():
        raise CheckpointError(f"initial_optimizer: {folder} holds no optimizer state (optimizer.json).")
    own = [dict(group) for group in optimizer.param_groups]
    try:
        optimizer_state.load_optimizer(folder, optimizer, model)
    except CheckpointError as error:
        raise CheckpointError(f"initial_optimizer: {folder}: {error}") from error
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})


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
