"""A whole copy of the model in training: to sample from older weights while it trains (`max_staleness`), or where its
parameters are sharded, so that no process has them whole.
"""

import sys
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from treewise.distributed import ranks
from treewise.distributed.fsdp import whole_tensor
from treewise.errors import ConfigError, bytes_as_text
from treewise.nn.device import free_bytes
from treewise.rl.samplers.protocol import Sampler
from treewise.rl.samplers.shared_prefix import device_of
from treewise.rl.samplers.transformers_sampler import TransformersSampler


class WholeCopy:
    """A copy of a model, made before that is sharded.

    Parameters:
        shares_frozen: what is not trained is not copied; of a model that is not going to be sharded.
        is_held: whether this process has a copy; else `take` helps the others to theirs.

    Attributes:
        model: the copy; None where this process has none. num_bytes: of it.

    Raises:
        ConfigError: there is no room for it.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, shares_frozen: bool, is_held: bool = True) -> None:
        frozen = [each for each in model.parameters() if shares_frozen and not each.requires_grad]
        places = {each.data_ptr() for each in frozen}
        copied = [each for each in _tensors(model).values() if each.data_ptr() not in places]
        self.num_bytes = sum(each.numel() * each.element_size() for each in copied) if is_held else 0
        free = free_bytes(device)
        if self.num_bytes > free:
            raise ConfigError(
                f"a whole copy of the weights, from which rollouts are sampled, takes {bytes_as_text(self.num_bytes)} "
                f"on {device}, and {bytes_as_text(free)} are free; sample on a server, or train fewer parameters."
            )
        self.model = deepcopy(model, {id(each): each for each in frozen}).to(device) if is_held else None
        self._names = _tensors(model).keys()

    def take(self, model: nn.Module) -> None:
        """Takes the weights of the model, tensor by tensor; every process calls this where they are sharded.

        Raises:
            ConfigError: another model than the one that was copied.
        """
        given = _tensors(model)
        if given.keys() != self._names:
            raise ConfigError("the sampler holds a copy of another model than the one that trains.")
        own = {} if self.model is None else _tensors(self.model)
        with torch.no_grad():
            for name, tensor in given.items():
                whole = whole_tensor(tensor) if isinstance(tensor, DTensor) else tensor
                if name in own and whole.data_ptr() != own[name].data_ptr():
                    own[name].copy_(whole)


class CopyingSampler(TransformersSampler):
    """A `TransformersSampler` on a copy of the model, which `update` gives the weights of the one in training."""

    def __init__(self, copy: WholeCopy, **settings: Any) -> None:
        assert copy.model is not None
        super().__init__(copy.model, **settings)
        self.copy = copy

    def update(self, model: nn.Module | None) -> None:
        """Raises as `WholeCopy.take`."""
        if model is not None:
            self.copy.take(model)


def samplers_of(
    given: Sampler, model: nn.Module, *, is_ahead: bool, is_sharded: bool
) -> tuple[Sampler, Sampler, WholeCopy | None]:
    """What samples training rollouts, what samples evaluations (from the newest weights), and the copy from which a
    server gets weights where no process has them whole: in the host memory of the first.

    Parameters:
        is_ahead: training rollouts are sampled while the model trains. is_sharded: the model is going to be.

    Raises:
        ConfigError: there is no room for a copy.
    """
    is_embedded = isinstance(given, TransformersSampler) and given.model is model
    if isinstance(given, TransformersSampler) and is_embedded and (is_ahead or is_sharded):
        copy = WholeCopy(model, device_of(model), shares_frozen=not is_sharded)
        if ranks.own() == 0:
            size = bytes_as_text(copy.num_bytes)
            sys.stdout.write(f"the sampler's copy of the weights has {size} on each process\n")
        copying = CopyingSampler(copy, **given.settings)
        return copying, copying if is_sharded else given, None
    if is_sharded:
        held = ranks.own() == 0
        return given, given, WholeCopy(model, torch.device("cpu"), shares_frozen=False, is_held=held)
    return given, given, None


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
