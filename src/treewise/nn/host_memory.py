"""The memory of the host in a walk (`offload`): gateways wait there, and the graphs of held micro-batches, without the
weights that autograd saves beside them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from treewise.nn.guest import Guest
from treewise.nn.model import DecoderAndHead
from treewise.nn.tensors import on_host

Saved = torch.Tensor | tuple[torch.device, torch.Tensor]


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
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if view not in views:
            views[view] = on_host(tensor)
        return tensor.device, views[view]


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
    if isinstance(saved, torch.Tensor):
        return saved
    device, kept = saved
    return kept.to(device, non_blocking=True)
