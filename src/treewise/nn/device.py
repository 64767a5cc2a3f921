"""The devices of this machine: which one is chosen, a clock, its rate of products and the vendor's peak."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch import nn

from treewise.errors import ConfigError

logger = logging.getLogger("treewise")
ModelT = TypeVar("ModelT", bound=nn.Module)

# Of the products by which a device's rate is measured.
MATRIX_SIZE = {"cpu": 768, "cuda": 4096}
NUM_PRODUCTS, MOST_SECONDS = 6, 0.3
# Dense bfloat16 FLOPs per second (without sparsity) from the data sheets, by a part of the device's name. The first
# match counts.
PEAK_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}


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


def on_device(model: ModelT, device: torch.device | str) -> ModelT:
    """`model.to(device)`, in place, whose type transformers' decorator hides."""
    return model.to(device)


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


def random_state_kept(device: torch.device) -> AbstractContextManager[object]:
    """Around what only looks at a model: random numbers that are drawn inside change no later ones."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


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


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOPs per second by the vendor's data sheet; None for an unknown device or another dtype than bfloat16."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


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
