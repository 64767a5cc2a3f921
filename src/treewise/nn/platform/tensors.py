"""Tensors between host and device: copies that no host operation waits for, what has data, the autocast around them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

# Of torch on a CPU, of libraries that allocate their own workspace on a GPU, and of CUDA itself (pinned memory, too).
_FAILED_ALLOCATIONS = ("can't allocate memory", "_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The array as a tensor of the device, in its own dtype where none is given.

    A plain copy from ordinary memory to a GPU waits until everything queued before it has run. From pinned memory it is
    queued like a kernel, so the host lays out the next micro-batch while the device still computes this one; torch's
    cache of pinned memory keeps the source until the copy is done. Arrays that cannot be written to, such as those of
    memory-mapped data, are copied: a tensor can be.
    """
    array = array if array.flags.writeable else array.copy()
    tensor = torch.as_tensor(array, dtype=dtype, device="cpu")  # whatever the default device
    if device.type != "cuda":
        return tensor.to(device, non_blocking=True)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, contiguous. From a GPU it is queued like a kernel, into pinned memory: until the host has
    waited for the device, only copies that are queued after it may read it (`.to(device, non_blocking=True)` of
    contiguous rows of it; what copies them on the host first would read what is not there yet).
    """
    is_pinned = torch.cuda.is_available() and not tensor.is_sparse
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, device="cpu", pin_memory=is_pinned)
    return kept.copy_(tensor.detach(), non_blocking=is_pinned)


def has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values, not a shape alone: its storage is on `meta`, wherever it claims to be."""
    return tensor.untyped_storage().device.type != "meta"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _FAILED_ALLOCATIONS)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of the autocast that is enabled on a type of device; None without, and for tensors without data."""
    is_enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_enabled else None


@dataclass(frozen=True, slots=True)
class Autocast:
    """The caller's autocast state, kept so that a backward that runs later computes in the dtypes of the forward."""

    device_type: str
    dtype: torch.dtype
    is_enabled: bool

    @classmethod
    def now(cls, device_type: str) -> "Autocast":
        """The state of the current thread."""
        return cls(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Enters the kept state, as for a recomputation in another thread."""
        with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.is_enabled):
            yield
