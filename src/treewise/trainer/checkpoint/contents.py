"""What a checkpoint of a run holds: weights, optimizer, schedule, random generators, state of the loop.

Weights and configuration are transformers' own files, so `from_pretrained` reads a checkpoint, unless it is
one of sharded parameters, in parts. Everything else is JSON
and safetensors. Here it is written; a run that goes on reads it (`resume.py`, `load_optimizer.py`, `weights.py`).
"""

import dataclasses
import hashlib
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState
from transformers.trainer_callback import ExportableState

from treewise.base import features
from treewise.base.weight_files import CHECKSUMS, write_checksums
from treewise.distributed import ranks
from treewise.distributed.parts import as_whole_model, mesh_of
from treewise.errors import CheckpointError
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.json_values import to_plain
from treewise.trainer.checkpoint.optimizer_state import OPTIMIZER, OptimizerState, optimizer_state, save_optimizer

if TYPE_CHECKING:
    from peft import PeftConfig

ARGUMENTS = "training_args.json"
STATE = "trainer_state.json"
SCHEDULE = "schedule.json"
TEMPLATE_DATES = "template_dates"  # that chat templates wrote in the data, as the manifest names them
SHARDS = "weights"  # the folder of a sharded checkpoint's weights


class SavedSettings(Protocol):
    """What is read of a run's settings (`TreeTrainingArguments`), which a checkpoint holds as a whole."""

    output_dir: str
    save_only_model: bool
    save_total_limit: int | None
    on_save_failure: str

    @property
    def should_save(self) -> bool: ...
    def shard_settings(self) -> Any: ...
    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that a checkpoint is written from.

    loop: transformers' state of the loop, into which the states of callbacks go. exporters: callbacks and the loop's
    control, of which some have a state (`ExportableState`).
    """

    args: SavedSettings
    model: PreTrainedModel
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
    weights = features.fsdp.whole_state(run.model) if is_whole and has_parts else None
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
        yield lambda: features.saved_weights.save_shards(folder / SHARDS, sharded_weights(run.model))
    yield lambda: write_model(folder, run.model, run.tokenizer, run.args, weights, is_whole=is_whole)
    if not run.args.save_only_model:
        found: list[OptimizerState] = []

        def gather() -> None:
            """What this rank writes of each tensor; of a mesh, with parts on several ranks, the first the whole."""

            def whole_on_first(_: str, tensor: torch.Tensor) -> torch.Tensor:
                whole = features.fsdp.whole_tensor(tensor) if isinstance(tensor, DTensor) else tensor
                return whole.cpu() if ranks.own() == 0 else torch.empty(0)

            state = optimizer_state(run.optimizer, run.model)
            found.append(state if is_sharded else state.mapped(whole_on_first))

        yield gather
        if is_sharded:
            yield lambda: features.saved_weights.save_shards(folder / OPTIMIZER, found[0].tensors)
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
    texts = {random_file(ranks.own()): json.dumps(to_plain(generators))}
    states: dict[str, Any] = vars(run.loop)["stateful_callbacks"]  # a dictionary, annotated as a list
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
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, args: SavedSettings
) -> list[str]:
    """The model at the end of a run, read back, whole or not at all; every rank calls this. The names of its files.

    Raises:
        CheckpointError: on all ranks, if any of them could not write. Files that were there are untouched.
    """
    state = features.fsdp.whole_state(model) if is_sharded_model(model) else None
    num_bytes = sum(each.numel() * each.element_size() for each in sharded_weights(model).values())

    def write_files() -> list[str]:
        if not args.should_save:
            return []
        with store.moved_into(folder, num_bytes, CHECKSUMS) as aside:
            write_model(aside, model, tokenizer, args, state)
            write_checksums(aside)
            return [path.relative_to(aside).as_posix() for path in sorted(aside.rglob("*")) if path.is_file()]

    return ranks.on_every_rank(write_files)[0]


def write_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    args: SavedSettings,
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
        with as_whole_model(model), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Setting `save_embedding_layers`")  # of PEFT, that it saves tables
            model.save_pretrained(folder, state_dict=state)
    else:
        adapters: Mapping[str, PeftConfig] | None = getattr(model, "peft_config", None)
        for each in [model.config] if adapters is None else adapters.values():
            each.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    # transformers would pickle the settings.
    write_texts(folder, {ARGUMENTS: json.dumps(args.to_dict(), indent=1, default=str)})


def random_file(rank: int) -> str:
    """The name of the file of a rank's random generators."""
    return f"random_{rank}.json"


def is_sharded_model(model: nn.Module) -> bool:
    """Whether any parameter is divided among processes, by FSDP2 or tensor parallelism."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def sharded_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights in a sharded checkpoint: all, or with adapters the trained ones."""
    has_adapters = hasattr(model, "peft_config")
    return {name: each.data for name, each in model.named_parameters() if each.requires_grad or not has_adapters}


def fingerprint(model: nn.Module) -> str:
    """Identifies the models that a checkpoint fits: the class, and names and shapes of the parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.requires_grad}\n".encode())
    number = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {number:,} parameters ({digest.hexdigest()[:12]})"
