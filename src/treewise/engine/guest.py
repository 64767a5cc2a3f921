"""What joins a walk beside the text of one rank: images, other ranks, the memory of the host. Each is a `Guest`.

A walk asks its guests at five moments: which passes come when, what a micro-batch is before it runs, what a forward is
given, what happens around the forward of a held micro-batch, and around a whole training.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from treewise.nn.attention import TreeMask
from treewise.nn.attention.context_parallel import ContextExchange
from treewise.nn.device import on_host
from treewise.nn.model import DecoderAndHead
from treewise.planning.context_parts import ContextPart
from treewise.planning.layout import Layout
from treewise.planning.planner import Pass, Plan


@dataclass(slots=True, eq=False)
class Piece:
    """A micro-batch as a walk runs it, kept from its first forward to its last.

    part: of it, where other ranks compute the rest; `layout` and `mask` are then those of the part. sees_trained_image:
    whether it holds features of a tower that is trained.
    """

    layout: Layout
    mask: TreeMask
    part: ContextPart | None = None
    sees_trained_image: bool = False


@dataclass(slots=True, eq=False)
class ForwardInputs:
    """What one forward of a piece is given. inside: the part of the model that runs and its arguments, in place of the
    decoder. exchange: what its attention layers exchange with other ranks."""

    inside: tuple[nn.Module, dict[str, Any]] | None = None
    exchange: ContextExchange | None = None


class Guest:
    """What joins a walk. Every default leaves the walk as it is.

    in_lockstep: ranks with other batches run the same passes. splits_pieces: other ranks compute the rest of every
    micro-batch. brings_images: it is the images of the walk's forest. may_meet_images: trees of other walks that this
    one stands for may have images. is_in_graph: nothing of it lies outside of the graph of the micro-batches.
    keeps_on_host: gateways wait in host memory.
    """

    in_lockstep = splits_pieces = brings_images = may_meet_images = keeps_on_host = False
    is_in_graph = True

    def passes(self, _plan: Plan, passes: Iterable[Pass]) -> Iterable[Pass]:
        """The passes of a training in their order."""
        return passes

    def turns(self, _plan: Plan, turns: Iterator[None]) -> Iterator[None]:
        """A turn for each forward of a visit, and one more step after the last."""
        return turns

    def join(self, piece: Piece) -> None:
        """Changes a micro-batch before its first forward."""

    def enter(self, piece: Piece, inputs: ForwardInputs) -> None:
        """Adds what a forward is given."""

    def holding(self, _lm: DecoderAndHead) -> AbstractContextManager[object]:
        """Around the forward of a held micro-batch."""
        return nullcontext()

    def training(self) -> AbstractContextManager[object]:
        """Around all passes of a training that has several roots."""
        return nullcontext()

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that compute parts of one micro-batch."""
        return tensor


class MeetsImages(Guest):
    """A walk without images that stands for one with some: gradients go as far as there."""

    may_meet_images = True


# -- the memory of the host: graphs of held micro-batches, without the weights that autograd saves beside them ---------


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
        view = (rows.storage_offset(), rows.shape, rows.stride(), rows.dtype, tensor._version)  # noqa: SLF001
        if view not in views:
            views[view] = on_host(rows)
        return OnHost(views[view], tensor.device, tensor.shape, tensor.stride(), not rows.is_contiguous())


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is or views a parameter that FSDP gathered, or a weight that autocast cast and keeps."""
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001
    if base.grad_fn is not None and base.grad_fn.name() == "ToCopyBackward0":
        base = getattr(base.grad_fn.next_functions[0][0], "variable", base)
    return isinstance(base, nn.Parameter)


def _storage(tensor: torch.Tensor) -> int:
    """Names a tensor's storage while it is alive; that of the local part of a shard."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return id(local.untyped_storage())


def _unpack(saved: Saved) -> torch.Tensor:
    return saved if isinstance(saved, torch.Tensor) else saved.back()
