"""Seconds, peak memory and gradients of contestants that take turns in one process."""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import nn

from treewise.bench.process_memory import limited_to_free, peak_bytes
from treewise.nn.device import is_out_of_memory, synchronized_clock
from treewise.nn.gradients import zero_gradients

Gradients = dict[str, torch.Tensor]
Contestants = dict[str, Callable[[], float]]


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
    started = time.perf_counter()
    measured = {name: Measured() for name in contestants}
    zero_gradients(model)
    with limited_to_free(_device(model)):
        for name, step in contestants.items():
            reference = _warm_up(model, step, measured[name], reference)
        for repetition in range(repetitions):
            if repetition and time.perf_counter() - started > max_seconds:
                break
            for name, step in contestants.items():
                if measured[name].skipped is None:
                    zero_gradients(model)
                    _unless_out_of_memory(partial(_time, step, measured[name], _device(model)), measured[name])
    zero_gradients(model)
    return measured


def _warm_up(
    model: nn.Module, step: Callable[[], float], out: Measured, reference: Gradients | None
) -> Gradients | None:
    zero_gradients(model)
    _release_memory()  # graphs of a contestant that was interrupted by an error
    before = peak_bytes(_device(model), reset=True)

    def run() -> None:
        out.loss = step()

    started = synchronized_clock(_device(model))
    _unless_out_of_memory(run, out)
    if out.skipped is not None:
        return reference
    out.first_seconds = synchronized_clock(_device(model)) - started
    after = peak_bytes(_device(model))
    out.peak_bytes = None if before is None or after is None else max(0, after - before)
    if reference is None:
        out.gradient_error = 0.0
        return gradients(model)
    out.gradient_error = gradient_error(model, reference)
    return reference


def _unless_out_of_memory(run: Callable[[], object], out: Measured) -> None:
    """Runs; `out.skipped` is set if memory did not suffice."""
    try:
        run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        out.skipped = f"out of memory: {str(error).splitlines()[0][:120]}"
    if out.skipped is not None:
        _release_memory()


def _time(step: Callable[[], float], out: Measured, device: torch.device) -> None:
    gc.collect()
    started = synchronized_clock(device)
    step()
    out.seconds.append(synchronized_clock(device) - started)


def spread(values: list[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": median(values), "min": min(values), "max": max(values)}


# -- gradients --------------------------------------------------------------------------------------------------------


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


# -- devices ---------------------------------------------------------------------------------------------------------


def _release_memory() -> None:
    """Collects reference cycles (graphs of an interrupted step) and returns cached blocks to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
