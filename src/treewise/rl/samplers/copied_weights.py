"""A whole copy of the model in training: to sample from older weights while it trains (`max_staleness`), or where its
parameters are in parts (shards, or those of a mesh), so that no process has them whole.
"""

import sys
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.initialization import no_init_weights

from treewise.base import features
from treewise.distributed import ranks
from treewise.distributed.parts import as_whole_model, mesh_of
from treewise.errors import ConfigError, bytes_as_text
from treewise.nn.platform.memory import free_bytes
from treewise.nn.wrapped import base_model
from treewise.rl.samplers.protocol import Sampler
from treewise.rl.samplers.shared_prefix import device_of
from treewise.rl.samplers.transformers_sampler import TransformersSampler


class WholeCopy:
    """A copy of a model that every process has whole, made before it is sharded; or, with the weights still to be
    taken, of one on a mesh.

    Parameters:
        shares_frozen: what is not trained is not copied; of a model whose parameters stay whole.
        is_held: whether this process has a copy; else `take` helps the others to theirs.

    Attributes:
        model: the copy; None where this process has none. num_bytes: of it.

    Raises:
        ConfigError: there is no room for it.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, shares_frozen: bool, is_held: bool = True) -> None:
        frozen = {
            id(parameter): parameter
            for parameter in model.parameters()
            if shares_frozen and not parameter.requires_grad
        }
        copied = [tensor for tensor in _tensors(model).values() if id(tensor) not in frozen]
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in copied) if is_held else 0
        free = free_bytes(device)
        if self.num_bytes > free:
            raise ConfigError(
                f"a whole copy of the weights, from which rollouts are sampled, takes {bytes_as_text(self.num_bytes)} "
                f"on {device}, and {bytes_as_text(free)} are free; sample on a server, or train fewer parameters."
            )
        make = partial(deepcopy, model, frozen) if mesh_of(model) is None else partial(_unparted, model, device)
        self.model = make().to(device) if is_held else None
        self._names = _tensors(model).keys()

    def take(self, model: nn.Module) -> None:
        """Takes the weights of the model, tensor by tensor; every process calls this where they are in parts.

        Raises:
            ConfigError: another model than the one that was copied.
        """
        given = _tensors(model)
        if given.keys() != self._names:
            raise ConfigError("the sampler holds a copy of another model than the one that trains.")
        own = {} if self.model is None else _tensors(self.model)
        with torch.no_grad():
            for name, tensor in given.items():
                whole = features.fsdp.whole_tensor(tensor) if isinstance(tensor, DTensor) else tensor
                if name in own and whole is not own[name]:
                    own[name].copy_(whole)


class CopyingSampler(TransformersSampler):
    """A `TransformersSampler` on a copy of the model, which `update` gives the weights of the one in training."""

    def __init__(self, copy: WholeCopy, **settings: Any) -> None:
        assert copy.model is not None
        super().__init__(copy.model.eval(), **settings)  # as two threads may sample from it
        self.copy = copy

    def update(self, model: nn.Module | None) -> None:
        """Raises as `WholeCopy.take`."""
        if model is not None:
            self.copy.take(model)


def samplers_of(given: Sampler, model: nn.Module, *, is_parted: bool) -> tuple[Sampler, Sampler, WholeCopy | None]:
    """What samples training rollouts, what samples evaluations (from the newest weights), and the copy from which a
    server gets weights where no process has them whole: in the host memory of the first.

    Parameters:
        is_parted: no process will have the model whole; else training rollouts are sampled while the model trains.

    Raises:
        ConfigError: there is no room for a copy.
    """
    if isinstance(given, TransformersSampler) and given.model is model:
        copy = WholeCopy(model, device_of(model), shares_frozen=not is_parted)
        if ranks.own() == 0:
            size = bytes_as_text(copy.num_bytes)
            sys.stdout.write(f"the sampler's copy of the weights has {size} on each process\n")
        copying = CopyingSampler(copy, **given.settings)
        return copying, copying if is_parted else given, None
    if is_parted:
        held = ranks.own() == 0
        return given, given, WholeCopy(model, torch.device("cpu"), shares_frozen=False, is_held=held)
    return given, given, None


def _unparted(model: nn.Module, device: torch.device) -> nn.Module:
    """A model on a mesh as one process has it, without its weights: of the same classes, configurations and dtypes."""
    base = base_model(model)
    with as_whole_model(model):
        config = deepcopy(base.config)
    with torch.random.fork_rng(), no_init_weights(), device:
        made: Any = type(base)._from_config(config)  # noqa: SLF001 - what `from_pretrained` calls
        for name, adapter in getattr(model, "peft_config", {}).items():
            made = _with_adapter(made, name, deepcopy(adapter))
    given = _tensors(model)
    for name, tensor in _tensors(made).items():
        if name in given:
            tensor.data = tensor.data.to(given[name].dtype)
    return made.train(model.training)


def _with_adapter(model: Any, name: str, settings: Any) -> Any:
    from peft import get_peft_model

    if not hasattr(model, "peft_config"):
        return get_peft_model(model, settings, adapter_name=name)
    model.add_adapter(name, settings)
    return model


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
