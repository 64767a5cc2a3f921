"""Samples from a copy of the model in training: older weights while it trains (`max_staleness`)."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from treewise.errors import ConfigError
from treewise.rl.samplers.transformers_sampler import TransformersSampler


class CopyingSampler(TransformersSampler):
    """A `TransformersSampler` with weights of its own, which `update` takes from the model in training. What is not
    trained is shared.

    Attributes:
        num_bytes: of the copy.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        frozen = [each for each in model.parameters() if not each.requires_grad]
        copy = deepcopy(model, {id(each): each for each in frozen})
        super().__init__(copy, **settings)
        self._own = _tensors(copy)
        places = {each.data_ptr() for each in frozen}
        own = [each for each in self._own.values() if each.data_ptr() not in places]
        self.num_bytes = sum(each.numel() * each.element_size() for each in own)

    def update(self, model: nn.Module | None) -> None:
        """Takes the weights of the model.

        Raises:
            ConfigError: another model than the one that was copied.
        """
        if model is None:
            return
        given = _tensors(model)
        if given.keys() != self._own.keys():
            raise ConfigError("the sampler holds a copy of another model than the one that trains.")
        with torch.no_grad():
            for name, tensor in given.items():
                if tensor.data_ptr() != self._own[name].data_ptr():
                    self._own[name].copy_(tensor)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
