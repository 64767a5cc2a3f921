"""Loads the weights of a checkpoint: whole, sharded, or of adapters. A weight without a saved value is an error.

transformers saves some models (mixtures of experts) under other names than their parameters have in memory, and its
Trainer leaves those as they are, when it resumes and when it loads the best checkpoint. Here they are read as
`from_pretrained` reads them.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from treewise.base import features
from treewise.distributed.parts import mesh_of
from treewise.errors import CheckpointError, ConfigError, num
from treewise.nn.wrapped import base_model, weight_of
from treewise.trainer.checkpoint.contents import SHARDS, is_sharded_model, sharded_weights
from treewise.trainer.checkpoint.store import listed_files

if TYPE_CHECKING:
    from treewise.nn.wrapped import AdaptedModel

_SAVED_BY_PEFT = ("modules_to_save", "trainable_tokens", "prompt_encoder")  # in names of parameters


# -- Sharded checkpoints: every rank writes its shards, as safetensors by PyTorch's DCP -------------------------------


def save_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes tensors, sharded (`DTensor`) or the same on all ranks; every rank calls this.

    Raises:
        CheckpointError: a rank could not write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _errors_named() as is_single:
        save(dict(tensors), storage_writer=writer, no_dist=is_single)


def load_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Reads into the given tensors, in place, from files of shards or whole ones; every rank calls this.

    Raises:
        CheckpointError: a tensor is missing from the checkpoint, also in part, or has another shape or dtype.
    """
    refuse_gaps(folder, tensors)
    with _errors_named() as is_single:
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=is_single)


def refuse_gaps(folder: Path, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Raises `CheckpointError` unless the files hold each tensor whole (DCP leaves as it is what no file holds), in its
    shape and dtype, by their headers. The names of all that they hold.
    """
    try:
        saved: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder.name}: missing or damaged ({error}).") from error
    for name, tensor in tensors.items():
        if name not in saved:
            raise CheckpointError(f"{folder.name}: {name} is missing.")
        found, dtype = saved[name], saved[name].properties.dtype
        chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks}
        num_held = sum(math.prod(sizes) for _, sizes in chunks)
        if tuple(found.size) != tuple(tensor.shape) or dtype != tensor.dtype or num_held != tensor.numel():
            raise CheckpointError(
                f"{folder.name}: {name} is {num_held} numbers of {list(found.size)} {dtype}, where {tensor.numel()} of "
                f"{list(tensor.shape)} {tensor.dtype} belong; a file is missing or is another run's."
            )
    return set(saved)


@contextmanager
def _errors_named() -> Iterator[bool]:
    """Around DCP, which warns in a run of one process, that may read shards as well; gives whether it is one.

    Raises:
        CheckpointError: DCP's errors, with the rank that had them.
    """
    is_single = not distributed.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield is_single
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"rank {rank}: {failure}") from error
    except (RuntimeError, ValueError) as error:  # the planner's errors without a process group
        if not is_single or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(error)) from error


# -- what a checkpoint of adapters would lack -------------------------------------------------------------------------


def refuse_unsaved(model: "AdaptedModel") -> None:
    """Raises `ConfigError` for parameters that are trained beside the adapters of a model: PEFT saves these alone."""
    from peft import get_peft_model_state_dict

    states: list[dict[str, torch.Tensor]] = [
        get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False) for name in model.peft_config
    ]
    saved = {tensor.data_ptr() for state in states for tensor in state.values()}
    # Some adapters are saved in another form than they are trained in.
    marks = (getattr(model.base_model, "prefix", None) or "modules_to_save", *_SAVED_BY_PEFT)
    lost = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.data_ptr() not in saved and not any(mark in name for mark in marks)
    ]
    if lost:
        raise ConfigError(
            f"{num(len(lost), 'parameter')} trained beside the adapters would be in no checkpoint and not in the saved "
            f"model: {', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}. Name the modules in modules_to_save of "
            "the adapter's configuration, or freeze them."
        )
    _refuse_lost_rows(model)


def _refuse_lost_rows(model: "AdaptedModel") -> None:
    """Raises `ConfigError` where a resized vocabulary would not be saved: where one of two tables of tokens is named in
    `target_modules`, PEFT saves that one alone, and none where it has no adapter then (`layers_to_transform`)."""
    tables, name = (
        features.adapters.tables_of(base_model(model)),
        model.active_peft_config.base_model_name_or_path,
    )
    if not name:
        return
    try:
        num_before = features.load_model.load_config(name).get_text_config().vocab_size
    except ConfigError:  # a base that is not there, of which PEFT holds that nothing was resized
        return
    from peft import get_peft_model_state_dict

    num_tokens = {len(weight_of(each)) for each in tables.values()}
    if num_tokens == {num_before}:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT, that it saves tables
        state: dict[str, torch.Tensor] = get_peft_model_state_dict(model)
    saved = features.adapters.saved_tables(base_model(model), {key: each.shape for key, each in state.items()})
    held = {id(weight_of(tables[path])) for path in saved}
    lost = [path for path, each in tables.items() if id(weight_of(each)) not in held]
    if lost:
        raise ConfigError(
            f"{', '.join(lost)} was resized from {num_before:,} tokens, and would be in no checkpoint and not in the "
            "saved model, as PEFT saves tables with adapters alone where target_modules name one. Put adapters on both "
            "or on none, or save the resized model and begin with that."
        )


# -- loading ----------------------------------------------------------------------------------------------------------


def load_weights(model: nn.Module, checkpoint: Path, adapter: str | None = None) -> None:
    """Loads the weights of a verified checkpoint into a model, from the files that its manifest lists. adapter: the one
    of the model whose weights the checkpoint holds, whatever it was called when they were saved; None: all of them.

    Raises:
        CheckpointError: a parameter, or a weight of an adapter, is missing from the checkpoint, or of another shape.
    """
    with listed_files(checkpoint) as folder:
        try:
            if (folder / SHARDS).is_dir():
                load_shards(folder / SHARDS, sharded_weights(model))
            elif (own := getattr(model, "peft_config", None)) is not None:
                names = own if adapter is None else [adapter]
                _load_adapters(
                    model, {name: folder if name in ("default", adapter) else folder / name for name in names}
                )
            else:
                _load_whole(model, folder)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint}: {error}") from error


def _load_whole(model: nn.Module, folder: Path) -> None:
    mesh = mesh_of(model)
    wanted = {name: parameter.data for name, parameter in model.named_parameters()}  # a tied parameter has one name
    if mesh is not None and isinstance(model, PreTrainedModel):
        load = partial(features.mesh.load_on_mesh, tp_size=mesh.tensor.size(), ep_size=mesh.expert.size())
        _check_complete(_load_converted(model, load, folder, wanted))
        return
    if is_sharded_model(model):
        raise CheckpointError("a whole checkpoint is loaded before a model is sharded; start a new process.")
    files = sorted(folder.glob("model*.safetensors"))
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as stream:
            names |= set(stream.keys())
    if set(wanted) <= names:
        for file in files:
            model.load_state_dict(load_file(file), strict=False)
        return
    if isinstance(model, PreTrainedModel):
        _check_complete(_load_converted(model, type(model).from_pretrained, folder, wanted))
    else:
        _check_complete(sorted(wanted))


def _load_converted(
    model: nn.Module, load: Callable[..., Any], folder: Path, wanted: dict[str, torch.Tensor]
) -> list[str]:
    """Reads through `from_pretrained` (`load`); returns the names of missing parameters."""
    widest = torch.float32  # holds the values of every parameter exactly, whatever its own dtype
    for value in wanted.values():
        widest = torch.promote_types(widest, value.dtype) if value.is_floating_point() else widest
    loaded, info = load(str(folder), dtype=widest, output_loading_info=True, use_safetensors=True)
    parameters = dict(loaded.named_parameters())
    missing = set(info["missing_keys"]) | {name for name in wanted if name not in parameters}
    for name, value in wanted.items():
        if name in parameters:
            value.copy_(_placed_like(parameters[name].data, value))
    buffers = dict(loaded.named_buffers())
    for name, buffer in model.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
    return sorted(missing & set(wanted))


def _placed_like(loaded: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A weight that was loaded on a mesh, in the shards of a model that was sharded on it since."""
    if not isinstance(value, DTensor) or not isinstance(loaded, DTensor) or loaded.device_mesh == value.device_mesh:
        return (
            loaded
            if isinstance(loaded, DTensor) or not isinstance(value, DTensor)
            else features.fsdp.like_shard(loaded, value)
        )
    fsdp = features.fsdp
    return fsdp.like_shard(fsdp.whole_tensor(loaded), value)


def _load_adapters(model: nn.Module, folders: dict[str, Path]) -> None:
    """Adapters of a PEFT model by name, which saves all but the one named `default` in folders of their own."""
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    for name, own in folders.items():
        if not (own / "adapter_model.safetensors").is_file():
            raise CheckpointError(f"holds no adapter {name!r}.")
        state: dict[str, torch.Tensor] = load_peft_weights(str(own), device="cpu")
        wanted: dict[str, torch.Tensor] = get_peft_model_state_dict(
            model, adapter_name=name, save_embedding_layers=False
        )
        _check_complete(
            sorted(key for key, each in wanted.items() if key not in state or state[key].shape != each.shape)
        )
        set_peft_model_state_dict(model, state, adapter_name=name)


def _check_complete(missing: Collection[str]) -> None:
    if missing:
        raise CheckpointError(f"holds no weights for {', '.join(list(missing)[:5])} ({len(missing)} in all).")
