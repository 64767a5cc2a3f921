"""Where the time of a step goes: seconds and FLOPs by part, from torch.profiler's record of operations.

An operation belongs to the part that its own name, or that of the nearest operation around it, stands for; what is in
none is element-wise work (norms, activations, rotary embeddings, residuals). On a CPU the seconds of an operation are
its own, without those inside it; the host's are the rest of the wall clock: Python, planning, layout. On a GPU seconds
are those of kernels, and the host's are the time in which none ran.

FLOPs are counted from the shapes of products, a multiply-add as two; attention's as in `nn.flops`, by the pairs that a
kernel computes. Batched products, of which attention without a kernel consists, count as attention.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from treewise.nn.device import synchronized_clock
from treewise.planning.partition import ATTENTION_BACKWARD

EMBEDDING, PROJECTIONS, HEAD, GATEWAYS = "embedding", "projections", "head and log-probs", "gateways"
CAUSAL, RECTANGLES, TILES = "attention: causal squares", "attention: rectangles", "attention: masked tiles"
MERGING, ADDING, GATHERS = "attention: merging parts", "adding up weight gradients", "gathers and copies"
ELEMENTWISE, HOST = "element-wise", "host"
ATTENTION = "attention: other kernels"
PARTS = (
    *(EMBEDDING, PROJECTIONS, CAUSAL, RECTANGLES, TILES, ATTENTION, MERGING, HEAD, GATHERS, GATEWAYS, ADDING),
    *(ELEMENTWISE, HOST),
)
# The part of an operation whose name holds a text, the first that does; operations inside it belong to it, too, unless
# they have a part of their own.
_NAMES = (
    ("embedding", EMBEDDING),
    ("EdgeValues", HEAD),
    ("_EdgeLoss", HEAD),
    ("AccumulateGrad", ADDING),
    ("_Extend", GATEWAYS),
    ("_Inject", GATEWAYS),
    ("_Cascade", MERGING),
    ("flex_attention", ATTENTION),
    ("scaled_dot_product", ATTENTION),
    ("flash_attn", ATTENTION),
)
_BATCHED = {"aten::bmm", "aten::baddbmm"}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::_grouped_mm"} | _BATCHED
_GATHERS = {"aten::index", "aten::index_select", "aten::gather", "aten::index_put_", "aten::_index_put_impl_"}
_GATHERS |= {"aten::index_add_", "aten::scatter_add_", "aten::cat", "aten::copy_", "aten::clone", "aten::contiguous"}
_FORWARD_KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
_OWN_KERNELS = {_FORWARD_KERNEL, f"{_FORWARD_KERNEL}_backward"}
# Of parts that keep whatever runs inside them.
_KEEPS = {HEAD, ADDING, EMBEDDING, GATEWAYS, ATTENTION}


@dataclass(frozen=True, slots=True)
class PartCost:
    """Of one part in one step: seconds, FLOPs (0 where none are counted) and operations."""

    seconds: float
    flops: float
    calls: int

    @property
    def flops_per_second(self) -> float:
        """0 where no FLOPs are counted."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """seconds: wall clock of the profiled step. parts: by name, in the order of `PARTS`."""

    seconds: float
    parts: dict[str, PartCost]


class ProfilerRecording:
    """torch.profiler from `ProfilerRecording(device)` to `stop()`."""

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._device = device
        if device.type == "cpu":  # torch 2.13 prints a line on stderr at each start and stop, above its errors
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._record = profile(activities=activities, record_shapes=True)
        self._record.start()
        self._started = synchronized_clock(device)

    def stop(self, trace: Path | None = None) -> Profile:
        """What ran since. trace: a file for the Chrome trace (chrome://tracing, Perfetto)."""
        seconds = synchronized_clock(self._device) - self._started
        self._record.stop()
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            self._record.export_chrome_trace(str(trace))
        events = [event for event in self._record.events() or () if isinstance(event, FunctionEvent)]
        return Profile(seconds, _parts(events, seconds, on_gpu=self._device.type == "cuda"))


def profile_step(step: Callable[[], object], device: torch.device, trace: Path | None = None) -> Profile:
    """Runs a step once and records it. Run it once before: the first one plans, probes and allocates."""
    recording = ProfilerRecording(device)
    try:
        step()
    finally:
        profiled = recording.stop(trace)
    return profiled


def mean(profiles: list[Profile]) -> Profile:
    """The mean step of several."""
    count = len(profiles)
    parts = {}
    for name in PARTS:
        costs = [each.parts[name] for each in profiles if name in each.parts]
        if costs:
            parts[name] = PartCost(
                sum(cost.seconds for cost in costs) / count,
                sum(each.flops for each in costs) / count,
                round(sum(each.calls for each in costs) / count),
            )
    return Profile(sum(each.seconds for each in profiles) / count, parts)


def _parts(events: list[FunctionEvent], seconds: float, *, on_gpu: bool) -> dict[str, PartCost]:
    sums = {name: [0.0, 0.0, 0] for name in PARTS}
    seen: dict[int, str] = {}
    for event in sorted(events, key=lambda each: (each.time_range.start, -each.time_range.end)):
        if event.device_type != DeviceType.CPU:
            continue  # kernels count with the operation that launched them
        name = seen[id(event)] = _part_of(event, seen)
        total = sums[name]
        microseconds: float = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        total[0] += microseconds / 1e6
        total[1] += _flops(event)
        total[2] += 1
    sums[HOST][0] = max(0.0, seconds - sum(total[0] for total in sums.values()))
    return {name: PartCost(*total) for name, total in sums.items() if total[0] or total[2]}  # type: ignore[arg-type]


def _part_of(event: FunctionEvent, seen: dict[int, str]) -> str:
    parent = event.cpu_parent
    around = ELEMENTWISE if parent is None else seen.get(id(parent), ELEMENTWISE)
    if event.name in _OWN_KERNELS:
        return _kernel_part(event)
    if around in _KEEPS or around in (CAUSAL, RECTANGLES, TILES):
        return around
    for text, part in _NAMES:
        if text in event.name:
            return part
    if around in (MERGING, PROJECTIONS):
        return around
    if event.name in _BATCHED or "BmmBackward" in event.name:
        return ATTENTION
    if event.name in _PRODUCTS or event.name == "aten::linear" or "mmBackward" in event.name.replace("Mm", "mm"):
        return PROJECTIONS
    return GATHERS if event.name in _GATHERS else around


def _shapes(event: FunctionEvent) -> list[Sequence[int]]:
    """Of its arguments that are tensors."""
    shapes: list[Any] = list(event.input_shapes or ())  # annotated as of one tensor there
    return [shape for shape in shapes if shape]


def _kernel_part(event: FunctionEvent) -> str:
    """Which kind of block a call of the CPU's attention kernel computes, from its arguments."""
    shapes = _shapes(event)
    if any(len(shape) == 4 and shape[0] == 1 and shape[1] == 1 for shape in shapes[3:]):
        return TILES
    query, key = (shapes[1], shapes[2]) if event.name.endswith("backward") else (shapes[0], shapes[1])
    return CAUSAL if query[2] == key[2] else RECTANGLES


def _flops(event: FunctionEvent) -> float:
    shapes = _shapes(event)
    if event.name in _PRODUCTS:
        if event.cpu_parent is not None and event.cpu_parent.name in _PRODUCTS:
            return 0.0  # on a CPU a grouped product calls one for each group
        first = 1 if "add" in event.name else 0  # after what is added to; a tensor given for the result comes last
        left, right = shapes[first : first + 2]
        return 2.0 * math.prod(left) * right[-1]
    if event.name not in _OWN_KERNELS:
        return 0.0
    is_backward = event.name.endswith("backward")
    query, key, value = shapes[1:4] if is_backward else shapes[:3]
    pairs = query[2] * (query[2] + 1) / 2 if _kernel_part(event) == CAUSAL else query[2] * key[2]
    return 2 * query[1] * (query[3] + value[3]) * pairs * (ATTENTION_BACKWARD if is_backward else 1)
