"""Graphs of held micro-batches that wait in host memory: what autograd saved of a walk, and nothing of the model.

Autograd saves the weights of a layer beside its activations. They stay where they are, as the model holds them anyway.
A tensor that several operations save is copied once.
"""

from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

Saved = torch.Tensor | tuple[torch.device, torch.Tensor]


class SavedOnHost(saved_tensors_hooks):
    """Inside, activations that autograd saves are copied to the host, and back to their device for the backward.

    Parameters:
        model: whose parameters and buffers, and views of these, are left where they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of_model = {_address(each) for each in (*model.parameters(), *model.buffers())}
        self._copies: dict[int, dict[Any, torch.Tensor]] = {}  # by storage, while it is alive; then by view of it
        super().__init__(self._pack, _unpack)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._copies.clear()

    def _pack(self, tensor: torch.Tensor) -> Saved:
        if _address(tensor) in self._of_model or _is_of_parameter(tensor):
            return tensor.detach()
        storage = tensor.untyped_storage()
        if id(storage) not in self._copies:
            self._copies[id(storage)] = {}
            finalize(storage, self._copies.pop, id(storage), None).atexit = False
        views = self._copies[id(storage)]
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)  # noqa: SLF001
        if view not in views:
            views[view] = _on_host(tensor)
        return tensor.device, views[view]


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is or views a parameter that FSDP gathered, or a weight that autocast cast and keeps."""
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001
    if base.grad_fn is not None and base.grad_fn.name() == "ToCopyBackward0":
        base = getattr(base.grad_fn.next_functions[0][0], "variable", base)
    return isinstance(base, nn.Parameter)


def _address(tensor: torch.Tensor) -> int:
    """Of a tensor's storage; that of the local part of a shard."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    is_pinned = torch.cuda.is_available() and not tensor.is_sparse
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, device="cpu", pin_memory=is_pinned)
    return kept.copy_(tensor, non_blocking=is_pinned)


def _unpack(saved: Saved) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    device, kept = saved
    return kept.to(device, non_blocking=True)
