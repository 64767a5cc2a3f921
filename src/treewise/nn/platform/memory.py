"""Free memory of a device, and what of freed memory the process keeps."""

import ctypes
import os
import platform
from pathlib import Path

import psutil
import torch

_NO_LIMIT = 2**62
_CGROUP_ROOT = Path("/sys/fs/cgroup")
# Of v2 and v1: where the limit stands, what is used, and what of that are files' pages, which can be dropped.
_V1 = "memory/memory."
_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (f"{_V1}limit_in_bytes", f"{_V1}usage_in_bytes", f"{_V1}stat", "total_inactive_file"),
)
# Parameters of glibc's mallopt (malloc.h): no memory is mapped for a large tensor alone, none is returned to the
# system, and the heap grows by 64 MiB at a time.
_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2
# How many compiled kernels oneDNN keeps, and torch's bridge to it: 1,024 each by default.
_KERNEL_CACHES, _KEPT_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), 64
_RESERVED = ("reserved", "active", "inactive_split")  # names of torch.cuda.memory_stats
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 * 2**20))


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device.

    On CUDA: what nobody has reserved, and what torch's allocator has reserved in pieces that are wholly unused, within
    the process's part of the memory (`torch.cuda.set_per_process_memory_fraction`). The unused rest of a piece in use
    is a fragment, for which a step need not have a tensor. On the CPU: available memory,
    or what the limit of the container (cgroups v2 and v1) leaves if that is less.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats(device)
        reserved, used, fragments = (stats.get(f"{each}_bytes.all.current", 0) for each in _RESERVED)
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
        return max(0, int(min(free, allowed) + reserved - used - fragments))
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


def keep_few_kernels() -> None:
    """Has oneDNN keep 64 compiled kernels, before its first product on a CPU; values of the environment stay.

    It compiles one for each shape, which takes 0.3 ms and 0.4 MiB. Trees and experts have new shapes at every step, so
    the 2,048 that are kept by default grow to 1 GiB and are seldom met again.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KEPT_KERNELS))


def _cgroup_room() -> int:
    """What the limit of the container leaves; what its files keep in memory makes room."""
    for limit_file, used_file, stat_file, cached in _CGROUPS:
        try:
            limit, used = ((_CGROUP_ROOT / name).read_text().strip() for name in (limit_file, used_file))
            stat = dict(line.split() for line in (_CGROUP_ROOT / stat_file).read_text().splitlines())
            return _NO_LIMIT if limit == "max" else max(0, int(limit) - int(used) + int(stat.get(cached, 0)))
        except (OSError, ValueError):
            continue
    return _NO_LIMIT
