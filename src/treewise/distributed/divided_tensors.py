"""Tensors of which processes hold parts: what this one holds, and gradients that are added up."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from treewise.distributed import ranks
from treewise.nn.gradients import zeros_of


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient divided as its parameter is: torch leaves that of a divided embedding whole on each rank."""
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        return grad.redistribute(parameter.device_mesh, parameter.placements)
    return grad


def sum_gradients(parameters: Iterable[nn.Parameter], group: distributed.ProcessGroup | None = None) -> None:
    """Adds up the gradients of ranks that hold the same parameters; one without a gradient contributes zeros. All call
    this after a step. group: of these ranks; None: all of the run.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = zeros_of(parameter)
            parameter.grad = placed_like(parameter.grad, parameter)
            distributed.all_reduce(local_part(parameter.grad), group=group)


def divided_dimensions(tensor: torch.Tensor) -> set[int]:
    """The dimensions along which processes hold parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return set()
    of_placements: list[Any] = [placement for placement in tensor.placements if not placement.is_replicate()]
    return {each.dim % tensor.dim() for each in of_placements}


def num_copies(tensor: torch.Tensor) -> int:
    """Processes that hold the same elements of a tensor."""
    if not isinstance(tensor, DTensor):
        return ranks.count()
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return ranks.count() // math.prod(size for size, placement in sizes if not placement.is_replicate())
