"""Seconds, peak memory and gradients of contestants that take turns in one process."""

import ctypes
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import nn

from treewise.nn.device import free_bytes, is_out_of_memory, synchronized_clock
from treewise.nn.gradients import zero_gradients

Gradients = dict[str, torch.Tensor]
Contestants = dict[str, Callable[[], float]]
# Fraction of the free memory that may be allocated. Beyond all of it Linux kills the process without an error.
ALLOCATABLE_FRACTION = 0.9


@dataclass(slots=True)
class Measured:
    """Measurements of one contestant. peak_bytes: above those in use before the step; None if unknown on this system.

    first_seconds: of the step that warms up, which probes and compiles. skipped: why it did not run, else None.
    """

    seconds: list[float] = field(default_factory=list)
    first_seconds: float = float("nan")
    loss: float = float("nan")
    peak_bytes: int | None = None
    gradient_error: float | None = None
    skipped: str | None = None


def measure(
    model: nn.Module,
    contestants: Contestants,
    repetitions: int,
    reference: Gradients | None = None,
    max_seconds: float = math.inf,
) -> dict[str, Measured]:
    """Runs every contestant once to warm up, then all in turn, so that a drifting machine affects all alike.

    The warm-up gives loss, peak memory and gradients. Those are compared with `reference`, or, without one, with the
    gradients of the first contestant that ran. One that runs out of memory is left out from then on. No round begins
    after `max_seconds`, except for the first.
    """
    begun, device = time.perf_counter(), next(model.parameters()).device
    measured = {name: Measured() for name in contestants}
    with limited_to_free(device):
        for name, step in contestants.items():
            found = measured[name]
            zero_gradients(model)
            _release_memory()  # graphs of a contestant that was interrupted by an error
            before = peak_bytes(device, reset=True)
            found.first_seconds = _timed(step, found, device)
            after = peak_bytes(device)
            if found.skipped is None:
                found.peak_bytes = None if before is None or after is None else max(0, after - before)
                found.gradient_error = 0.0 if reference is None else gradient_error(model, reference)
                reference = gradients(model) if reference is None else reference
        for repetition in range(repetitions):
            if repetition and time.perf_counter() - begun > max_seconds:
                break
            for name, step in contestants.items():
                if measured[name].skipped is None:
                    zero_gradients(model)
                    gc.collect()
                    measured[name].seconds.append(_timed(step, measured[name], device))
    zero_gradients(model)
    return measured


def _timed(step: Callable[[], float], found: Measured, device: torch.device) -> float:
    """Seconds of a step; `found.skipped` is set if memory did not suffice."""
    started = synchronized_clock(device)
    try:
        found.loss = step()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        found.skipped = f"out of memory: {str(error).splitlines()[0][:120]}"
    if found.skipped is not None:
        _release_memory()
        return math.nan
    return synchronized_clock(device) - started


def spread(values: list[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def gradients(model: nn.Module) -> Gradients:
    """A copy of all gradients in host memory."""
    return {name: each.grad.detach().cpu().clone() for name, each in model.named_parameters() if each.grad is not None}


def gradient_error(model: nn.Module, reference: Gradients) -> float:
    """Norm of the difference of the whole gradient over the norm of the reference."""
    difference = norm = 0.0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        expected = reference[name].to(parameter.device).double()  # on the device: the host is slow at this
        own = torch.zeros_like(expected) if parameter.grad is None else parameter.grad.double()
        difference += float((own - expected).square().sum())
        norm += float(expected.square().sum())
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return float((difference / norm) ** 0.5)


# -- memory of this process -------------------------------------------------------------------------------------------


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
            with suppress(AttributeError, OSError, TypeError):  # another C library than GNU's
                ctypes.CDLL(None).malloc_trim(0)
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


def _release_memory() -> None:
    """Collects reference cycles (graphs of an interrupted step) and returns cached blocks to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
