"""Ranks that compute one batch together, each a part of the tokens of every micro-batch (context parallelism)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from treewise.distributed import ranks
from treewise.distributed.mesh import sum_gradients
from treewise.errors import ConfigError, num


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that compute a batch together. group: torch's. size: their number. index: of this rank, from 0."""

    group: Any
    size: int
    index: int

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks; all call this."""
        total = tensor.contiguous().clone()
        distributed.all_reduce(total, group=self.group)
        return total

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds the ranks' gradients up, as `mesh.sum_gradients` does."""
        sum_gradients(parameters, self.group)

    def add_up_by_name(self, values: dict[str, float]) -> dict[str, float]:
        """The sums of numbers, of which a rank may lack some; all call this."""
        of_ranks: list[Any] = [None] * self.size
        distributed.all_gather_object(of_ranks, values, group=self.group)
        names = dict.fromkeys(name for each in of_ranks for name in each)
        return {name: sum(each.get(name, 0.0) for each in of_ranks) for name in names}


def context_group(size: int, device_type: str) -> ContextGroup | None:
    """The group of this rank, of `size` ranks that follow one another; None for 1. All ranks of the run call this.

    Raises:
        ConfigError: a size that does not divide the processes.
    """
    check_context_size(size, ranks.count())
    if size == 1:
        return None
    sizes, names = (ranks.count() // size, size), ("data", "context")
    with ranks.making_groups():
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)["context"]
    ranks.follow_timeout(mesh)
    return ContextGroup(mesh.get_group(), size, mesh.get_local_rank())


def check_context_size(size: int, num_ranks: int, tp_size: int = 1, ep_size: int = 1) -> None:
    """Raises `ConfigError` for a number of ranks that cannot be divided so, or for a mesh that cannot be combined."""
    if size < 1:
        raise ConfigError(f"context_size={size}; give 1 or more processes.")
    if num_ranks % size:
        raise ConfigError(
            f"context_size={size} does not divide the {num(num_ranks, 'process', 'processes')}; change one of the two."
        )
    if size > 1 and tp_size * ep_size > 1:
        raise ConfigError(
            f"context_size={size} cannot be combined with tp_size={tp_size}, ep_size={ep_size}: leave it out and lower "
            "max_tokens, or shard the model by sharded=True instead of tp_size and ep_size."
        )
