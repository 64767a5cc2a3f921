"""Loads the weights of a checkpoint: whole, sharded, or of adapters. A weight without a saved value is an error.

transformers saves some models (mixtures of experts) under other names than their parameters have in memory, and its
Trainer leaves those as they are, when it resumes and when it loads the best checkpoint. Here they are read as
`from_pretrained` reads them.
"""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from treewise.distributed.fsdp import like_shard, whole_tensor
from treewise.distributed.mesh import load_on_mesh, mesh_of
from treewise.errors import CheckpointError, ConfigError, num
from treewise.trainer.checkpoint.manifest import listed_files
from treewise.trainer.checkpoint.sharded_io import load_shards

SHARDS = "weights"  # the folder of a sharded checkpoint's weights
_SAVED_BY_PEFT = ("modules_to_save", "trainable_tokens", "prompt_encoder")  # in names of parameters


def is_sharded_model(model: nn.Module) -> bool:
    """Whether FSDP2 has sharded any parameter."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def sharded_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights in a sharded checkpoint: all, or with adapters the trained ones."""
    has_adapters = hasattr(model, "peft_config")
    return {name: each.data for name, each in model.named_parameters() if each.requires_grad or not has_adapters}


def refuse_unsaved(model: Any) -> None:
    """Raises `ConfigError` for parameters that are trained beside adapters: PEFT saves adapters alone."""
    if not hasattr(model, "peft_config"):
        return
    from peft import get_peft_model_state_dict

    states = [
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


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Loads the weights of a verified checkpoint into a model, from the files that its manifest lists.

    Raises:
        CheckpointError: a parameter, or a weight of an adapter, is missing from the checkpoint.
    """
    with listed_files(checkpoint) as folder:
        try:
            if (folder / SHARDS).is_dir():
                load_shards(folder / SHARDS, sharded_weights(model))
            elif hasattr(model, "peft_config"):
                _load_adapters(model, folder)
            else:
                _load_whole(model, folder)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint}: {error}") from error


def _load_whole(model: nn.Module, folder: Path) -> None:
    mesh = mesh_of(model)
    wanted = {name: parameter.data for name, parameter in model.named_parameters()}  # a tied parameter has one name
    if mesh is not None and isinstance(model, PreTrainedModel):
        load = partial(load_on_mesh, tp_size=mesh.tensor.size(), ep_size=mesh.expert.size())
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
        return loaded if isinstance(loaded, DTensor) or not isinstance(value, DTensor) else like_shard(loaded, value)
    return like_shard(whole_tensor(loaded), value)


def _load_adapters(model: Any, folder: Path) -> None:
    """Every adapter of a PEFT model, which saves all but the one named `default` in folders of their own."""
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    for name in model.peft_config:
        own = folder if name == "default" else folder / name
        if not (own / "adapter_model.safetensors").is_file():
            raise CheckpointError(f"holds no adapter {name!r}.")
        state = load_peft_weights(str(own), device="cpu")
        _check_complete(sorted(set(get_peft_model_state_dict(model, adapter_name=name)) - set(state)))
        set_peft_model_state_dict(model, state, adapter_name=name)


def _check_complete(missing: Collection[str]) -> None:
    if missing:
        raise CheckpointError(f"holds no weights for {', '.join(list(missing)[:5])} ({len(missing)} in all).")
