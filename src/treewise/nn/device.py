"""What depends on this machine: its devices, free and kept memory, a clock, its rate of products."""

import ctypes
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import torch

from treewise.errors import ConfigError
from treewise.nn.support_table import TESTED_TORCH, untested_torch

logger = logging.getLogger("treewise")

_NO_LIMIT = 2**62
# Parameters of glibc's mallopt (malloc.h): no memory is mapped for a large tensor alone, none is returned to the
# system, and the heap grows by 64 MiB at a time.
_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD = -4, -1, -2
# How many compiled kernels oneDNN keeps, and torch's bridge to it: 1,024 each by default.
_KERNEL_CACHES, _KEPT_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), 64
# Of the products by which a device's rate is measured.
MATRIX_SIZE = {"cpu": 768, "cuda": 4096}
NUM_PRODUCTS, MOST_SECONDS = 6, 0.3
_RESERVED = ("reserved", "active", "inactive_split")  # names of torch.cuda.memory_stats
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 * 2**20))


@contextmanager
def without_accelerates_fsdp() -> Iterator[None]:
    """Inside, `accelerate launch --use_fsdp` decides nothing about how models are loaded or wrapped: what it asks for
    is a setting of treewise (`sharded`), which shards by units that trees run through.
    """
    asked = os.environ.get("ACCELERATE_USE_FSDP")
    if asked is not None:
        os.environ["ACCELERATE_USE_FSDP"] = "false"
    try:
        yield
    finally:
        if asked is not None:
            os.environ["ACCELERATE_USE_FSDP"] = asked


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


def part_of_torch(path: str) -> Any:
    """`torch.PATH`, one of the parts that are not public.

    Raises:
        ConfigError: this torch lacks it; names what the tests run with.
    """
    try:
        return attrgetter(path)(torch)
    except AttributeError as error:
        raise ConfigError(
            f"torch {torch.__version__} has no torch.{path}, which treewise needs; install torch {TESTED_TORCH}."
        ) from error


@contextmanager
def untested_torch_named() -> Iterator[None]:
    """Around what depends on parts of torch that are not public: errors inside name a torch that no test ran with."""
    try:
        yield
    except Exception as error:
        if untested := untested_torch(torch.__version__):
            error.add_note(f"torch {untested}")
        raise


@cache
def warn_of_untested_torch() -> None:
    """A warning, once, where no test ran with this torch."""
    if untested := untested_torch(torch.__version__):
        logger.warning("torch %s; compare gradients by `treewise verify`, and see `treewise doctor`.", untested)


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device.

    On CUDA: what nobody has reserved, and what torch's allocator has reserved in pieces that are wholly unused, within
    the process's part of the memory (`torch.cuda.set_per_process_memory_fraction`). The unused rest of a piece in use
    is a fragment, for which a step need not have a tensor. On the CPU: available memory,
    or what the limit of the container (cgroup v2) leaves if that is less.
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


def synchronized_clock(device: torch.device) -> float:
    """`time.perf_counter()` once the device has finished all queued work. Seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@cache
def matmul_flops(kind: str, dtype: torch.dtype, width: int | None = None) -> float | None:
    """FLOPs per second of the fastest of a few products of two large matrices; None without memory or a kernel for it.

    kind: `cpu` or `cuda`. width: of a model, whose rows are multiplied by a square weight; None: large square matrices.
    Draws no random number, takes less than a second, and is measured once in a process.
    """
    size = MATRIX_SIZE.get(kind)
    if size is None:
        return None
    seconds: list[float] = []
    try:
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            matrix = torch.ones(size, width or size, dtype=dtype, device=kind)
            weight = torch.ones(width or size, width or size, dtype=dtype, device=kind)
            while len(seconds) < NUM_PRODUCTS and sum(seconds) < MOST_SECONDS:
                begin = synchronized_clock(matrix.device)
                torch.mm(matrix, weight)
                seconds.append(synchronized_clock(matrix.device) - begin)
    except (RuntimeError, MemoryError):
        return None
    return 2.0 * size * (width or size) ** 2 / max(min(seconds), 1e-9)


@cache
def warn_of_slow_precision(kind: str, dtype: torch.dtype) -> None:
    """A warning, once, where a device computes half precision slower than float32, for lack of hardware for it."""
    if dtype.itemsize == 2 and (times := half_precision_times(kind, dtype)) is not None and times > 1:
        logger.warning(
            "this processor takes %.1f times as long for a matrix product in %s as in float32: it saves memory "
            "here, and no time.",
            times,
            str(dtype).removeprefix("torch."),
        )


def half_precision_times(kind: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Seconds of a matrix product in half precision over those in float32; None where one of them is not known."""
    half, plain = matmul_flops(kind, dtype), matmul_flops(kind, torch.float32)
    return plain / half if half and plain else None


def _cgroup_room() -> int:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return _NO_LIMIT
    return _NO_LIMIT if limit == "max" else max(0, int(limit) - used)
