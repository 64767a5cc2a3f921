"""What depends on the device at hand: copies to it, free and kept memory, a clock, the autocast state."""

import ctypes
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from treewise.errors import ConfigError

_NO_LIMIT = 2**62
# Parameters of glibc's mallopt (malloc.h): no memory is mapped for a large tensor alone, none is returned to the
# system, and the heap grows by 64 MiB at a time.
_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2
# Of torch on a CPU, of libraries that allocate their own workspace on a GPU, and of CUDA itself (pinned memory, too).
_FAILED_ALLOCATIONS = ("can't allocate memory", "_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 * 2**20))


def chosen_device(name: str | None) -> torch.device:
    """The device of `--device`; without a name the first GPU where there is one, else the CPU.

    Raises:
        ConfigError: no name of a device, a kind that treewise does not run on, or one that this machine lacks.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device is {name!r}, which is not a device; give cpu, cuda, cuda:1, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {name!r}; treewise runs on cpu and cuda.")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise ConfigError(f"--device is {name!r}, and torch {torch.__version__} finds no GPU here.")
        if (device.index or 0) >= count:
            raise ConfigError(f"--device is {name!r}, and there are {count} GPUs here, numbered from 0.")
    return device


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
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, unused blocks of the caching allocator included.

    On the CPU: available memory, or what the limit of the container (cgroup v2) leaves if that is less.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return min(psutil.virtual_memory().available, _cgroup_room())


def keep_freed_memory() -> bool:
    """Has freed host memory kept by the process for its next tensors, from now on; returns whether it is.

    glibc returns the memory of each large tensor to the system when it is freed, and the next step faults every page of
    it in again, zeroed. Kept memory costs what the largest step took, as long as the process lives; other processes
    cannot use it meanwhile. On systems without glibc nothing changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return sum(libc.mallopt(name, value) for name, value in _KEEPING) == len(_KEEPING)  # each returns 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _FAILED_ALLOCATIONS)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of the autocast that is enabled on a type of device; None without, and for tensors without data."""
    is_enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_enabled else None


def synchronized_clock(device: torch.device) -> float:
    """`time.perf_counter()` once the device has finished all queued work. Seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
        """The kept state inside."""
        with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.is_enabled):
            yield


def _cgroup_room() -> int:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return _NO_LIMIT
    return _NO_LIMIT if limit == "max" else max(0, int(limit) - used)
