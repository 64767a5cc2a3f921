"""Ranks that compute one batch together, each a part of the tokens of every micro-batch (context parallelism)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from treewise.base import features
from treewise.distributed import groups, ranks
from treewise.distributed.context.exchange import ContextExchange
from treewise.distributed.context.parts import ContextPart, context_part, part_bounds
from treewise.distributed.divided_tensors import sum_gradients
from treewise.errors import ConfigError, UnsupportedModelError, num
from treewise.nn.attention import TreeMask
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.guest import Guest, RunningMicroBatch
from treewise.nn.model_flops import flop_model


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
        names = dict.fromkeys(name for rank in of_ranks for name in rank)
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
    with groups.making_groups():
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)["context"]
    groups.follow_timeout(mesh)
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


class ContextWalk(Guest):
    """Which part of every micro-batch this rank computes.

    lm: the model, by whose FLOPs parts are made equal. mesh: that it is sharded by.

    Raises:
        ConfigError: a mesh of tensor or expert parallelism.
        UnsupportedModelError: layers whose states would cross from rank to rank.
    """

    splits_tokens = True

    def __init__(self, lm: DecoderAndHead, ranks: ContextGroup, mesh: Any) -> None:
        if mesh is not None:
            raise ConfigError(
                f"context_size={ranks.size} is not implemented together with {mesh.sizes}: leave context= out and "
                "lower max_tokens, or load the model whole."
            )
        base = lm.base
        if lm.is_recurrent:
            path, kind = next(iter(features.recurrent.kinds_of(lm.decoder).items()))
            raise UnsupportedModelError(
                f"{type(base).__name__} has recurrent layers ({path}: {kind}), whose states do not cross from rank to "
                f"rank; leave context_size={ranks.size} out and give max_tokens a number."
            )
        self.ranks, self._flops, self._device = ranks, flop_model(base), lm.device

    def join(self, run: RunningMicroBatch) -> None:
        """Leaves this rank's part of a micro-batch."""
        bounds = part_bounds(self._flops.of_tokens(run.layout.depth), self.ranks.size)
        run.part = context_part(run.layout, bounds, self.ranks.index)
        run.layout = run.part.layout
        run.mask = TreeMask.from_layout(run.layout)

    def enter(self, run: RunningMicroBatch) -> None:
        run.exchange = self.exchange(run.part)

    def exchange(self, part: ContextPart) -> ContextExchange:
        """What attention layers exchange in one forward."""
        return ContextExchange(self.ranks.group, part.bounds, part.rows, self.ranks.index, self._device)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.ranks.add_up(tensor)

    def add_up_by_name(self, values: dict[str, float]) -> dict[str, float]:
        return self.ranks.add_up_by_name(values)
