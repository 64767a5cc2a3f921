"""Copies between a GPU and pinned memory of the host on a stream of their own, beside the kernels of a step.

Two rules keep them right. A copy to the host begins after what was queued before it was asked for, which computes the
tensor, and the allocator keeps that memory until the copy has read it. What comes back is used only after an event that
follows its copy, and its memory goes to no other copy before the kernels that use it have run. A copy there and one
back of the same memory are on one stream, in that order.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from treewise.nn.platform.memory import free_bytes
from treewise.nn.platform.tensors import on_host

Arrival = Callable[[], Tensor]  # the copy on the device; what the caller queues from then on runs after it


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether sums of gradients of so many bytes take at most half of a device's free memory."""
    return 2 * num_bytes <= free_bytes(device)


class SideCopies:
    """The stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in pinned memory, which only `to_device` may read."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            kept = on_host(tensor)
        tensor.record_stream(self._stream)
        return kept

    def to_device(self, kept: Tensor) -> Arrival:
        """Begins to copy back what `to_host` returned, or rows of it."""
        with torch.cuda.stream(self._stream):
            there = kept.to(self._device, non_blocking=True)
            arrived = self._stream.record_event()

        def arrival() -> Tensor:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(arrived)
            there.record_stream(current)
            return there

        return arrival


@cache
def side_copies(device: torch.device) -> SideCopies:
    """Those of a GPU, one stream for all walks."""
    return SideCopies(device)
