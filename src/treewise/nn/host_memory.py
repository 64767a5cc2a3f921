"""The memory of the host in a walk (`offload`): gateways wait there, and the graphs of held micro-batches, without the
weights that autograd saves beside them.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from treewise.nn.decoder import DecoderAndHead
from treewise.nn.guest import Guest
from treewise.nn.platform.tensors import on_host


@dataclass(frozen=True, slots=True)
class OnHost:
    """A tensor whose numbers wait on the host, in the order in which they lay in its memory (`_in_memory_order`).

    shape, stride: of the tensor, which compiled backwards require as they were, whatever views they were given.
    has_gaps: whether other numbers lay between its own.
    """

    kept: torch.Tensor
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]
    has_gaps: bool

    def back(self) -> torch.Tensor:
        """The tensor on its device again; what lay between its numbers is not there."""
        there = self.kept.to(self.device, non_blocking=True)
        if not self.has_gaps:
            return there.as_strided(self.shape, self.stride)
        made = torch.empty_strided(self.shape, self.stride, dtype=there.dtype, device=self.device)
        _in_memory_order(made).copy_(there)
        return made


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose axes (one at least) go from far numbers to near ones, each once: contiguous, but for gaps."""
    strides = tensor.stride()
    once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    return torch.atleast_1d(once.permute(sorted(range(tensor.dim()), key=lambda axis: -strides[axis])).squeeze())


Saved = torch.Tensor | OnHost


class HostMemory(Guest):
    """Gateways and the graphs of held micro-batches wait in host memory."""

    keeps_on_host = True

    def holding(self, lm: DecoderAndHead) -> AbstractContextManager[object]:
        return nullcontext() if lm.device.type == "cpu" else SavedOnHost(lm.model)


class SavedOnHost(saved_tensors_hooks):
    """Inside, activations that autograd saves are copied to the host, and back to their device for the backward.

    Parameters:
        model: whose parameters and buffers, and views of these, are left where they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of_model = {_storage(each) for each in (*model.parameters(), *model.buffers())}
        self._copies: dict[int, dict[Any, torch.Tensor]] = {}  # by storage, while it is alive; then by view of it
        super().__init__(self._pack, _unpack)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._copies.clear()

    def _pack(self, tensor: torch.Tensor) -> Saved:
        if _storage(tensor) in self._of_model or _is_of_parameter(tensor):
            return tensor.detach()
        storage = tensor.untyped_storage()
        if id(storage) not in self._copies:
            self._copies[id(storage)] = {}
            finalize(storage, self._copies.pop, id(storage), None).atexit = False
        views = self._copies[id(storage)]
        rows = _in_memory_order(tensor.detach())
        view = (rows.storage_offset(), rows.shape, rows.stride(), rows.dtype, tensor._version)
        if view not in views:
            views[view] = on_host(rows)
        return OnHost(views[view], tensor.device, tensor.shape, tensor.stride(), not rows.is_contiguous())


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is or views a parameter that FSDP gathered, or a weight that autocast cast and keeps."""
    base = tensor if tensor._base is None else tensor._base
    if base.grad_fn is not None and base.grad_fn.name() == "ToCopyBackward0":
        base = getattr(base.grad_fn.next_functions[0][0], "variable", base)
    return isinstance(base, nn.Parameter)


def _storage(tensor: torch.Tensor) -> int:
    """Names a tensor's storage while it is alive; that of the local part of a shard."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return id(local.untyped_storage())


def _unpack(saved: Saved) -> torch.Tensor:
    return saved if isinstance(saved, torch.Tensor) else saved.back()
