"""What a checkpoint of a run holds: weights, optimizer, schedule, random generators, state of the loop.

Weights and configuration are transformers' own files, so `from_pretrained` reads a checkpoint (`weights.py` loads
them). Everything else is JSON and safetensors.
"""

import dataclasses
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState
from transformers.trainer_callback import ExportableState

from treewise.base.features import feature
from treewise.distributed import ranks
from treewise.distributed.parts import as_whole_model, mesh_of
from treewise.errors import CheckpointError
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.json_values import from_plain, to_plain
from treewise.trainer.checkpoint.optimizer_state import (
    OPTIMIZER,
    OptimizerState,
    load_optimizer,
    optimizer_state,
    save_optimizer,
)
from treewise.trainer.checkpoint.store import listed_files
from treewise.trainer.checkpoint.weights import SHARDS, is_sharded_model, save_shards, sharded_weights

ARGUMENTS = "training_args.json"
STATE = "trainer_state.json"
SCHEDULE = "schedule.json"


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that a checkpoint is written from.

    loop: transformers' state of the loop, into which the states of callbacks go. exporters: callbacks and the loop's
    control, of which some have a state (`ExportableState`).
    """

    args: TreeTrainingArguments
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    loop: TrainerState
    exporters: Sequence[object] = ()
    tokenizer: PreTrainedTokenizerBase | None = None


# -- saving -----------------------------------------------------------------------------------------------------------


def write(run: RunState, run_dir: Path, facts: dict[str, Any]) -> Path:
    """Writes and publishes a checkpoint of a run at its present step; every rank calls this.

    A rank that cannot write must not leave the others waiting in a collective operation. So the files are written in
    stages that hold at most one such operation, which reports failures by itself; after each stage either all ranks go
    on or none does.

    Raises:
        CheckpointError: on all ranks, if any of them could not write; earlier checkpoints are untouched.
    """
    step = run.loop.global_step
    folder = store.aside(run_dir, step)
    explained = partial(store.explained, folder, _num_bytes(run))
    has_parts, settings = is_sharded_model(run.model), run.args.shard_settings()
    is_sharded = has_parts and mesh_of(run.model) is None  # a mesh's are whole, so that any other mesh reads them
    is_whole = not is_sharded or bool(settings and settings.whole_checkpoints)
    weights = feature("fsdp").whole_state(run.model) if is_whole and has_parts else None
    try:
        ranks.on_first_rank(explained()(lambda: str(store.new_folder(run_dir, step))))
        for stage in _stages(run, folder, weights, is_sharded=is_sharded, is_whole=is_whole):
            ranks.on_every_rank(explained()(stage))
        return Path(ranks.on_first_rank(explained()(lambda: str(store.publish(folder, facts)))))
    except CheckpointError:
        if ranks.own() == 0:  # all ranks have left the folder
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _stages(
    run: RunState, folder: Path, weights: dict[str, torch.Tensor] | None, *, is_sharded: bool, is_whole: bool
) -> Iterator[Callable[[], object]]:
    """The work of each rank, in order. weights: what `save_pretrained` writes; None: the model's own."""
    if is_sharded:
        yield lambda: save_shards(folder / SHARDS, sharded_weights(run.model))
    yield lambda: write_model(folder, run.model, run.tokenizer, run.args, weights, is_whole=is_whole)
    if not run.args.save_only_model:
        found: list[OptimizerState] = []

        def gather() -> None:
            """What this rank writes of each tensor; of a mesh, with parts on several ranks, the first the whole."""

            def whole_on_first(_: str, tensor: torch.Tensor) -> torch.Tensor:
                whole = feature("fsdp").whole_tensor(tensor) if isinstance(tensor, DTensor) else tensor
                return whole.cpu() if ranks.own() == 0 else torch.empty(0)

            state = optimizer_state(run.optimizer, run.model)
            found.append(state if is_sharded else state.mapped(whole_on_first))

        yield gather
        if is_sharded:
            yield lambda: save_shards(folder / OPTIMIZER, found[0].tensors)
        yield lambda: save_optimizer(folder, found[0], is_sharded=is_sharded) if ranks.own() == 0 else None
    yield lambda: write_texts(folder, _texts(run))


def _num_bytes(run: RunState) -> int:
    """Bytes of the weights and the optimizer's tensors: nearly all of a checkpoint."""
    tensors: list[torch.Tensor] = list(run.model.parameters())
    for entry in getattr(run.optimizer, "state", {}).values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _texts(run: RunState) -> dict[str, str]:
    """Random generators of every rank (Python's, NumPy's, torch's, and those of its CUDA devices); schedule and loop,
    with the states of callbacks, from the first one.
    """
    generators = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - callbacks and transformers draw from the global generator
        "torch": torch.random.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    texts = {_random_file(ranks.own()): json.dumps(to_plain(generators))}
    states = run.loop.stateful_callbacks
    for exporter in run.exporters:
        if isinstance(exporter, ExportableState):
            name = type(exporter).__name__
            if isinstance(states.get(name), list):
                states[name].append(exporter.state())
            else:
                states[name] = exporter.state()
    schedule = None
    if not run.args.save_only_model:
        schedule = {"kind": type(run.scheduler).__name__, "state": to_plain(run.scheduler.state_dict())}
    if run.args.should_save:
        # What `TrainerState.save_to_json` writes.
        texts[STATE] = json.dumps(dataclasses.asdict(run.loop), indent=2, sort_keys=True) + "\n"
        if schedule is not None:
            texts[SCHEDULE] = json.dumps(schedule)
    return texts


def write_texts(folder: Path, texts: dict[str, str]) -> None:
    """Writes JSON files, by name. Each rank has its own."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def save_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, args: TreeTrainingArguments
) -> list[str]:
    """The model at the end of a run, read back, whole or not at all; every rank calls this. The names of its files.

    Raises:
        CheckpointError: on all ranks, if any of them could not write. Files that were there are untouched.
    """
    state = feature("fsdp").whole_state(model) if is_sharded_model(model) else None
    num_bytes = sum(each.numel() * each.element_size() for each in sharded_weights(model).values())

    def write_files() -> list[str]:
        if not args.should_save:
            return []
        with store.moved_into(folder, num_bytes) as aside:
            write_model(aside, model, tokenizer, args, state)
            return [path.relative_to(aside).as_posix() for path in sorted(aside.rglob("*")) if path.is_file()]

    return ranks.on_every_rank(write_files)[0]


def write_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    args: TreeTrainingArguments,
    state: dict[str, torch.Tensor] | None = None,
    *,
    is_whole: bool = True,
) -> None:
    """The model as `from_pretrained` reads it, its tokenizer, and the settings of the run.

    state: the gathered weights of a sharded model (`whole_state`). is_whole: False for what lies beside its shards.
    """
    if not args.should_save:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if is_whole:
        with as_whole_model(model):
            model.save_pretrained(folder, state_dict=state)
    else:
        for each in model.peft_config.values() if hasattr(model, "peft_config") else [model.config]:
            each.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    # transformers would pickle the settings.
    write_texts(folder, {ARGUMENTS: json.dumps(args.to_dict(), indent=1, default=str)})


# -- loading ----------------------------------------------------------------------------------------------------------


def load_states(checkpoint: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Optimizer and schedule of a checkpoint, with the settings of this run where they differ (`optimizer_state`).

    Raises:
        CheckpointError: a checkpoint of weights alone, of another optimizer, or of another kind of schedule.
    """
    with listed_files(checkpoint) as folder:
        try:
            if not (folder / f"{OPTIMIZER}.json").is_file():
                raise CheckpointError(
                    "holds a model without its optimizer (save_only_model); start a new run from its weights."
                )
            load_optimizer(folder, optimizer, model)
            _load_schedule(folder, scheduler, optimizer)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint}: {error}") from error


def _load_schedule(folder: Path, scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Loads a schedule, and sets the learning rates of the next step.

    Schedules that are functions of the step's number (all of transformers' but two) go on by the settings of this run:
    its rate, warm-up and length. Others go on from their state.

    Raises:
        CheckpointError: another kind of schedule, or another rate in one that goes on from its state.
    """
    saved = json.loads((folder / SCHEDULE).read_text(encoding="utf-8"))
    state, kind = from_plain(saved["state"]), type(scheduler).__name__
    if saved["kind"] != kind:
        raise CheckpointError(
            f"lr_scheduler_type: {saved['kind']} -> {kind}: the saved state does not fit another schedule. "
            "Resume with the former, or start a new run from the checkpoint's weights."
        )
    own = list(getattr(scheduler, "base_lrs", ()))
    if isinstance(scheduler, LambdaLR):
        rates = [base * rule(state["last_epoch"]) for base, rule in zip(own, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state |= {"base_lrs": own, "_last_lr": rates}
    elif own != list(state.get("base_lrs", own)):
        raise CheckpointError(
            f"learning rate: {state['base_lrs']} -> {own}: a {kind} continues from the saved rate. Resume with the "
            "former, or start a new run from the checkpoint's weights."
        )
    scheduler.load_state_dict(state)


def load_random_state(checkpoint: Path) -> None:
    """The random generators of this rank, if there was such a rank. Only callbacks depend on them: the order of steps
    has a generator of its own, and dropout is an error.
    """
    with listed_files(checkpoint) as folder:
        path = folder / _random_file(ranks.own())
        state = from_plain(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    if state is not None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        torch.random.set_rng_state(state["torch"])
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])


def _random_file(rank: int) -> str:
    return f"random_{rank}.json"


def fingerprint(model: nn.Module) -> str:
    """Identifies the models that a checkpoint fits: the class, and names and shapes of the parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.requires_grad}\n".encode())
    number = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {number:,} parameters ({digest.hexdigest()[:12]})"
