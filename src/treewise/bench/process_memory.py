"""Memory of this process: its peak, and a limit that turns running out of it into an error."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from treewise.nn.device import free_bytes

# Fraction of the free memory that may be allocated. Beyond all of it Linux kills the process without an error.
ALLOCATABLE_FRACTION = 0.9


def peak_bytes(device: torch.device, *, reset: bool = False) -> int | None:
    """Bytes of the peak so far; `reset` begins a new peak and returns the bytes in use now.

    On CUDA that of torch's allocator; on Linux the resident set, after freed memory is returned; else None.
    """
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
            return int(torch.cuda.memory_allocated(device))
        return int(torch.cuda.max_memory_allocated(device))
    try:
        if reset:
            gc.collect()
            _trim()
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's own reset of the peak
        return _status("VmRSS" if reset else "VmHWM")
    except OSError:
        return None


@contextmanager
def limited_to_free(device: torch.device) -> Iterator[None]:
    """Inside, an allocation beyond the free memory fails with an error. On Linux and a CPU; elsewhere nothing happens.

    What counts is the private memory that a process may write to (RLIMIT_DATA), touched or not.
    """
    if device.type != "cpu" or sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _status("VmData") + int(ALLOCATABLE_FRACTION * free_bytes(device))
    known = [each for each in (limit, soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


def _trim() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library than GNU's
        return
