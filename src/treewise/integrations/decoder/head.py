"""The head of a model that was given a tree's rows: each row is projected once, however many rows of the batch hold it.

A causal language model slices the hidden rows that its decoder returned and gives them to its head. Rows that are
recognised as those (by their memory, unchanged since) are projected row by row of the tree, and the logits put into the
batch's rows. Copies of them, and heads whose weight is read without a call, are computed as the model has it.

Letters: B rows of the batch, L tokens of a row, T tokens of the tree, M model width, V vocabulary.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from treewise.integrations.decoder.lazy_logits import LazyLogits
from treewise.integrations.decoder.outputs import GatheredRows
from treewise.nn.platform.tensors import to_device

# The rows of the tree are projected apart where there are fewer of them by this.
_MIN_RATIO = 1.1


@dataclass(frozen=True, slots=True, eq=False)
class GivenRows:
    """Hidden rows that a decoder has returned.

    batch: a reference to them, [B, L, M], contiguous. version: of their memory. tree: [T + 1, M], with one for padding.
    place: [B * L] int64, of each row in `tree`.
    """

    batch: "weakref.ref[torch.Tensor]"
    version: int
    tree: torch.Tensor
    place: np.ndarray

    @classmethod
    def of(cls, batch: torch.Tensor, tree: torch.Tensor, place: np.ndarray) -> "GivenRows":
        return cls(weakref.ref(batch), _version(batch), tree, place)

    def places_of(self, rows: torch.Tensor) -> np.ndarray | None:
        """Where each of some rows stands in `tree`, in their shape without the last axis; None if they are others."""
        batch = self.batch()
        if batch is None or _version(batch) != self.version or rows.dtype != batch.dtype:
            return None
        width = batch.shape[-1]
        is_part = rows.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()
        if not is_part or rows.dim() < 2 or rows.shape[-1] != width or (rows.stride(-1) != 1 and width > 1):
            return None
        *steps, first = [*rows.stride()[:-1], rows.storage_offset() - batch.storage_offset()]
        if any(each % width for each in (*steps, first)):
            return None
        strides = [each // width * self.place.itemsize for each in steps]
        return np.lib.stride_tricks.as_strided(self.place[first // width :], rows.shape[:-1], strides, writeable=False)


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; in inference mode torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


class TreeHead:
    """Makes a model's head project the rows of a tree once; `give` tells which these are.

    is_lazy: whether logits may be computed when they are read. num_shared, num_whole: calls whose rows were those of a
    tree, and other calls after rows were given.
    """

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self._given: GivenRows | None = None
        self._own: Any = None
        self._had: Any = None
        self.is_lazy = False
        self.num_shared = self.num_whole = 0
        self._installed = MethodType(self._forward(), head)

    def _forward(self) -> Callable[..., torch.Tensor | LazyLogits]:
        def forward(head: nn.Module, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if head is not self._head or args or kwargs:
                return type(head).forward(head, rows, *args, **kwargs)
            return self._project(rows)

        return forward

    def give(self, rows: GivenRows | None) -> None:
        """The rows that calls may come with from now on. Without any the head's forward is its own."""
        self._given = rows
        is_installed = vars(self._head).get("forward") is self._installed
        if rows is None and is_installed:
            del self._head.forward
            if self._had is not None:
                self._head.forward = self._had
        elif rows is not None and not is_installed:
            self._own, self._had = self._head.forward, vars(self._head).get("forward")
            self._head.forward = self._installed

    @property
    def is_whole(self) -> bool:
        """Whether the head is whole on this device."""
        return not any(isinstance(each, DTensor) for each in self._head.parameters())

    @torch.compiler.disable
    def _project(self, rows: torch.Tensor) -> torch.Tensor | LazyLogits:
        given = self._given
        places = None if given is None or not self.is_whole else given.places_of(rows)
        if given is not None and places is not None and places.size:
            if self.is_lazy and torch.is_grad_enabled():
                self.num_shared += 1
                return LazyLogits(given.tree, places, self._own)
            # Of the rows that the call was given, by whose gradients hooks of FSDP2 find its backward.
            distinct, first, index = np.unique(places, return_index=True, return_inverse=True)
            if places.size >= _MIN_RATIO * len(distinct):
                self.num_shared += 1
                chosen = rows.reshape(-1, rows.shape[-1]).index_select(0, to_device(first, rows.device))
                return GatheredRows.apply(self._own(chosen), to_device(index.reshape(places.shape), rows.device))
        self.num_whole += given is not None
        own: torch.Tensor = self._own(rows)
        return own
