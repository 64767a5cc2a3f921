"""Parameters outside the layers (embedding, last norm, head) of a sharded model.

The engine calls the decoder and uses the head's weight apart from any module's forward, for many micro-batches. So
these parameters are gathered once for all micro-batches of a batch, and their gradients are added up and scattered once
after it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from treewise.distributed.divided_tensors import divided_dimensions, local_part, placed_like
from treewise.distributed.mesh import Mesh, broadcast


class Ends:
    """The parameters outside the layers: shards, and whole while `whole` is entered.

    Of one that tensor parallelism has divided, whole is the part that this rank had before; it is sharded along another
    dimension.

    Parameters:
        inside: the parameters of the layers.
        axes: the ranks to shard over, in one axis, or in two for hybrid sharding; and the same with the axis of tensor
            parallelism, for a model on a mesh.
        mesh: of a model that was loaded on one.
    """

    def __init__(
        self,
        model: nn.Module,
        inside: set[nn.Parameter],
        axes: tuple[DeviceMesh, DeviceMesh | None],
        device: torch.device,
        mesh: Mesh | None,
    ) -> None:
        self._owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        self._spreads: dict[nn.Parameter, _Sharded] = {}
        self._is_whole = False
        outside: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter not in inside:
                    outside.setdefault(parameter, []).append((module, name))  # several modules: a tied parameter
        for parameter, owners in outside.items():
            broadcast(parameter.data, device, mesh)
            spread = _Sharded(parameter.data, *axes)
            shard = nn.Parameter(spread.shard(parameter.data.to(device)), requires_grad=parameter.requires_grad)
            self._owners[shard], self._spreads[shard] = owners, spread
            _put(owners, shard)

    @contextmanager
    def whole(self, trains: bool) -> Iterator[None]:
        """Gathers the parameters; afterwards adds the ranks' gradients up into the shards' `.grad` where `trains`.

        A collective: every rank enters and leaves at the same time.
        """
        if self._is_whole:
            yield
            return
        gathered = {
            shard: nn.Parameter(spread.gather(shard), requires_grad=shard.requires_grad)
            for shard, spread in self._spreads.items()
        }
        for shard, owners in self._owners.items():
            _put(owners, gathered[shard])
        self._is_whole = True
        try:
            yield
            if trains:
                for shard, parameter in gathered.items():
                    if shard.requires_grad:
                        # A rank without a gradient contributes zeros.
                        own = torch.zeros_like(parameter.data) if parameter.grad is None else parameter.grad
                        summed = self._spreads[shard].add_up(placed_like(own, parameter.data))
                        shard.grad = summed if shard.grad is None else shard.grad + summed
        finally:
            self._is_whole = False
            for shard, owners in self._owners.items():
                _put(owners, shard)


class _Sharded:
    """How one parameter is sharded over ranks that hold it alike, and gathered again."""

    def __init__(self, held: torch.Tensor, data: DeviceMesh, data_and_tensor: DeviceMesh | None) -> None:
        self._shape, self._stride, self._mesh = held.shape, held.stride(), data
        self._own: tuple[DeviceMesh, tuple[Placement, ...]] | None = None  # under tensor parallelism
        rest: tuple[Placement, ...] = ()
        if isinstance(held, DTensor):
            assert data_and_tensor is not None
            self._mesh, rest = data_and_tensor, held.placements
            self._own = held.device_mesh, rest
        divided = divided_dimensions(held)
        free: list[Placement] = [Shard(dim) for dim in range(held.dim()) if dim not in divided]
        last = free[0] if free else Replicate()
        self._whole = (*[Replicate()] * data.ndim, *rest)
        self._partial = (*[Partial()] * data.ndim, *rest)
        self._sharded = (*[Replicate()] * (data.ndim - 1), last, *rest)

    def shard(self, whole: torch.Tensor) -> DTensor:
        return self._placed(whole, self._whole)

    def add_up(self, grad: torch.Tensor) -> DTensor:
        """Shards of the sum of the ranks' gradients."""
        return self._placed(grad, self._partial)

    def gather(self, shard: nn.Parameter) -> torch.Tensor:
        held = cast(DTensor, shard.data).redistribute(self._mesh, self._whole).to_local()
        if self._own is None:
            return held
        return DTensor.from_local(held, *self._own, run_check=False, shape=self._shape, stride=self._stride)

    def _placed(self, tensor: torch.Tensor, placements: tuple[Placement, ...]) -> DTensor:
        own = local_part(tensor)
        held = DTensor.from_local(own, self._mesh, placements, run_check=False, shape=self._shape, stride=self._stride)
        return held.redistribute(self._mesh, self._sharded)


def _put(owners: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    for module, name in owners:
        module._parameters[name] = parameter
