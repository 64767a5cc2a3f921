"""Adapters that are not the identity, for the moment of a probe."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_NOISE = 0.05  # of an adapter's own size, or absolute where that is zero


@contextmanager
def adapters_stirred(model: nn.Module) -> Iterator[None]:
    """Inside, trained parameters of PEFT's adapters have noise added, always the same; then their own data is back.

    The storage is exchanged, not written to: nothing that autograd saved before is invalid afterwards.
    """
    parameters = _adapter_parameters(model)
    originals = [(each, each.data) for each in parameters]
    try:
        with torch.inference_mode(mode=False):  # data of a parameter cannot be a tensor of inference mode
            for index, parameter in enumerate(parameters):
                parameter.data = _stirred(parameter.data, index)
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data


@torch.no_grad()
def _stirred(data: torch.Tensor, seed: int) -> torch.Tensor:
    if isinstance(data, DTensor):  # parts of an adapter may have any noise; whole ones have the same on all ranks
        part = _stirred(data.to_local(), seed)
        mesh, places = data.device_mesh, data.placements
        return DTensor.from_local(part, mesh, places, run_check=False, shape=data.shape, stride=data.stride())
    generator = torch.Generator(data.device).manual_seed(seed)
    noise = torch.randn(data.shape, generator=generator, device=data.device, dtype=torch.float32)
    size = data.float().square().mean().sqrt().nan_to_num()
    return (data.float() + noise * torch.where(size > 0, _NOISE * size, _NOISE)).to(data.dtype)


def _adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Trained parameters of modules within adapter layers, apart from the layers that these adapt."""
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "adapter_layer_names")]
    adapted = {
        id(parameter)
        for layer in layers
        if isinstance(getattr(layer, "base_layer", None), nn.Module) and not hasattr(layer.base_layer, "base_layer")
        for parameter in layer.base_layer.parameters()
    }
    of_adapters = {id(each): each for layer in layers for each in layer.parameters() if id(each) not in adapted}
    return [each for each in of_adapters.values() if each.requires_grad and each.is_floating_point()]
