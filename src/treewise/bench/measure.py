"""Seconds, peak memory and gradients of contestants that take turns in one process; workloads on a model, beside the
FLOP bounds.
"""

import copy
import ctypes
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from treewise.base.progress import busy_with
from treewise.bench.contestants import Contestant, builders, layers_of, plain_parts, prepare, twin
from treewise.bench.fitting import LEAST_ROUNDS, fitted, flops_per_second, round_flops
from treewise.bench.flat import FlatRows, merged_trajectories
from treewise.bench.pace import REFERENCE, Pace, TooSlow
from treewise.bench.results import is_ours
from treewise.bench.settings import REFERENCES, Settings
from treewise.bench.varlen import HALF, LOOP
from treewise.bench.workloads import Workload
from treewise.errors import ConfigError, OutOfMemoryError, VerificationError, duration, num
from treewise.nn.attention.needs import place_of
from treewise.nn.device import matmul_flops, synchronized_clock
from treewise.nn.flops import FlopModel
from treewise.nn.model_flops import flop_model
from treewise.nn.platform.memory import free_bytes
from treewise.nn.platform.tensors import is_out_of_memory
from treewise.nn.whole_gradients import Gradients, gradient_error, gradients_of, take_gradients, zero_gradients
from treewise.nn.wrapped import num_embeddings
from treewise.tree.forest import Forest

Contestants = dict[str, Callable[[], float]]
# Fraction of the free memory that may be allocated. Beyond all of it Linux kills the process without an error.
ALLOCATABLE_FRACTION = 0.9


@dataclass(slots=True)
class Measured:
    """Measurements of one contestant. peak_bytes: above those in use before the step; None if unknown on this system.

    first_seconds: of the step that warms up, which probes and compiles. skipped: why it did not run, else None; error:
    where that was one which nobody expects.
    """

    seconds: list[float] = field(default_factory=list)
    first_seconds: float = float("nan")
    loss: float = float("nan")
    peak_bytes: int | None = None
    gradient_error: float | None = None
    skipped: str | None = None
    error: Exception | None = None


def measure(
    model: nn.Module,
    contestants: Contestants,
    repetitions: int,
    reference: Gradients | None = None,
    max_seconds: float = math.inf,
    pace: Pace | None = None,
    on_step: Callable[[dict[str, Measured]], None] = lambda _: None,
    on_error: Callable[[Exception], None] | None = None,
) -> dict[str, Measured]:
    """Runs every contestant once to warm up, then all in turn, so that a drifting machine affects all alike.

    The warm-up gives loss, peak memory and gradients. Those are compared with `reference`, or, without one, with the
    gradients of the first contestant that ran. One that runs out of memory is left out from then on, and one that would
    take longer than is left of `max_seconds` before it has. No round begins that would end after them, except for the
    first. pace: of the workload, which has begun. on_step: called after each step.

    One that raises is left out, too, and the others are measured first: a kernel that does not run on a new card does
    not take the rest of a run with it. on_error: then called with each error, in place of raising the first.
    """
    device = next(model.parameters()).device
    pace = Pace(max_seconds) if pace is None else pace
    measured = {name: Measured() for name in contestants}
    with limited_to_free(device):
        for number, (name, step) in enumerate(contestants.items(), 1):
            found = measured[name]
            if (why := pace.refusal(name)) is not None:
                found.skipped = why
                pace.on_line(_told(name, why))
                continue
            zero_gradients(model)
            _release_memory()  # graphs of a contestant that was interrupted by an error
            before = peak_bytes(device, reset=True)
            with busy_with(f"{name}, first step"), pace.first_step(name, device):
                found.first_seconds = _timed(step, found, device)
            after = peak_bytes(device)
            if found.skipped is None:
                found.peak_bytes = None if before is None or after is None else max(0, after - before)
                if reference is None:
                    reference, found.gradient_error = gradients_of(model, torch.device("cpu")), 0.0
                else:
                    with busy_with(f"{name}, comparing its gradient"):
                        found.gradient_error = gradient_error(take_gradients(model), reference)
                following = repetitions * [*pace.seconds, name]
                pace.end(name, found.first_seconds, "first step", following, len(contestants) - number)
            else:
                pace.on_line(_told(name, found.skipped))
            on_step(measured)
        for repetition in range(repetitions):
            if repetition and not pace.has_time_for_a_round():
                break
            names = list(contestants)
            for number, (name, step) in enumerate(contestants.items(), 1):
                found = measured[name]
                if found.skipped is None:
                    zero_gradients(model)
                    gc.collect()
                    with busy_with(f"{name}, step {repetition + 1}"):
                        found.seconds.append(_timed(step, found, device))
                    if math.isnan(found.seconds[-1]):  # left out from now on
                        pace.seconds.pop(name)
                    else:
                        following = [*names[number:], *(repetitions - repetition - 1) * names]
                        pace.end(name, found.seconds[-1], f"step {repetition + 1}", following)
                    on_step(measured)
    zero_gradients(model)
    for error in (found.error for found in measured.values() if found.error is not None):
        if on_error is None:
            raise error
        on_error(error)
    return measured


def _told(name: str, skipped: str) -> str:
    """The line of a contestant without figures; what follows the colon stands below the table."""
    return f"{name}: {skipped.partition(': ')[0]}"


def _timed(step: Callable[[], float], found: Measured, device: torch.device) -> float:
    """Seconds of a step; `found.skipped` is set if memory or time did not suffice."""
    started = synchronized_clock(device)
    try:
        found.loss = step()
    except TooSlow as error:
        found.skipped = str(error)
    except Exception as error:  # whatever a contestant raises: the others are measured, and then it is raised
        first, *_ = str(error).splitlines() or [""]
        if is_out_of_memory(error):
            found.skipped = f"out of memory: {first[:120]}"
        else:
            found.skipped, found.error = f"failed: {type(error).__name__}: {first[:120]}", error
            clear_frames(error.__traceback__)  # which hold the graph of the step
    if found.skipped is not None:
        _release_memory()
        return math.nan
    return synchronized_clock(device) - started


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and largest value."""
    return {"median": median(values), "min": min(values), "max": max(values)}


# -- memory of this process -------------------------------------------------------------------------------------------


def peak_bytes(device: torch.device, *, reset: bool = False) -> int | None:
    """Bytes of the peak so far; `reset` begins a new peak and returns the bytes in use now.

    On CUDA what torch's allocator has reserved, after unused memory is returned; on Linux the resident set, after freed
    memory is; else None.
    """
    if device.type == "cuda":
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return int(torch.cuda.memory_reserved(device))
        return int(torch.cuda.max_memory_reserved(device))
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


# -- a workload on a model --------------------------------------------------------------------------------------------

# Relative difference of a contestant's loss from the first one's beyond which the comparison fails, by dtype.
LOSS_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
Row = dict[str, Any]  # of a file of results


def run(
    model_of: Callable[[], PreTrainedModel],
    name: str,
    workloads_of: Callable[[int], Iterable[Workload]],
    on_row: Callable[[Row], None],
    settings: Settings,
    on_line: Callable[[str], None] = lambda _: None,
    on_partial: Callable[[Row], None] = lambda _: None,
) -> None:
    """Measures every workload on one model, the shortest first, within `settings.max_seconds` in all, from when the
    model and the data are there.

    on_row is called with each row as soon as it is complete, on_line with a line for every step, and on_partial after
    each with the row as it is then.

    workloads_of: from the size of the vocabulary. One that may be cut is, where it does not fit into its part of the
    seconds that are left. A model that does not fit in memory gives one row with the reason under `skipped`; so does a
    workload whose contestants differ in their losses, and one that no second is left for.

    Raises:
        VerificationError: contestants whose losses differ, once all workloads are measured. So is what a contestant
            raises.
    """
    try:
        model = model_of()
    except OutOfMemoryError as error:
        on_row({"model": name, "skipped": str(error)})
        return
    failures: list[Exception] = []
    workloads = sorted(workloads_of(num_embeddings(model)), key=_num_flat_tokens)
    begun = perf_counter()
    rate = flops_per_second(model, workloads[0]) if workloads else None
    for index, whole in enumerate(workloads):
        where = {"model": name, "workload": whole.name}

        def tell(line: str, where: Row = where) -> None:
            on_line(f"{', '.join(where.values())}: {line}")

        def keep(row: Row, where: Row = where) -> None:
            on_partial({**where, **row})

        left = (settings.max_seconds - (perf_counter() - begun)) / (len(workloads) - index)
        if left <= 0 and index:  # the shortest is always measured
            taken = f"--max_seconds {settings.max_seconds:g}"
            on_row({**where, "skipped": f"not measured: what came before took all of {taken}"})
            continue
        own, workload = replace(settings, max_seconds=left), whole
        if whole.may_be_cut and left < math.inf:
            workload, fits = fitted(whole, flop_model(model), rate, own, left)
            own = replace(own, leaves_out=not fits)
        try:
            row = measure_workload(twin(model), workload, own, tell, keep, failures.append, rate)
            on_row({"model": name, **row})
        except VerificationError as error:
            failures.append(error)
            on_row({**where, "skipped": str(error)})
    if failures:
        raise failures[0]


def _num_flat_tokens(workload: Workload) -> int:
    return sum(map(len, workload.trajectories))


def measure_workload(
    model: PreTrainedModel,
    workload: Workload,
    settings: Settings,
    on_line: Callable[[str], None] = lambda _: None,
    on_partial: Callable[[Row], None] = lambda _: None,
    on_error: Callable[[Exception], None] | None = None,
    rate: float | None = None,
) -> Row:
    """Plain JSON values: the workload, its ratios and bounds, and a record for each contestant.

    model: a transformers causal language model without treewise installed on it. on_line, on_partial: see `run`;
    on_error: see `measure`. rate: FLOPs per second, by which it says how long it should take.

    Raises:
        VerificationError: contestants whose losses differ, so they do not compute the same.
    """
    items, processor = list(workload.trajectories), workload.processor
    forest = Forest.from_trajectories(items)
    budgets: Sequence[int] = workload.max_tokens or [max(1, forest.num_tokens // 4)]
    if settings.max_tokens is not None:
        budgets = settings.max_tokens
    pace = Pace(settings.max_seconds, on_line=on_line, leaves_out=settings.leaves_out)
    wide, reference_name = _reference(model, forest, settings.reference, processor, pace)
    made = {name: prepare(build) for name, build in builders(model, items, settings, budgets, processor).items()}
    ready = {name: each for name, each in made.items() if isinstance(each, Contestant)}
    pace.num_tokens = {name: each.num_computed_tokens for name, each in ready.items()}
    on_line(_announcement(workload, forest, list(ready), flop_model(model), settings, rate))
    facts = {
        "workload": workload.name,
        "num_left_out": workload.num_left_out,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "varlen_kernel": next((each.kernel.name for each in ready.values() if each.kernel is not None), LOOP),
        "capability": place_of(model.device.type, None).capability,
        "layers": layers_of(settings.layers, model.device),
        "product_flops": matmul_flops(model.device.type, model.dtype, model.config.get_text_config().hidden_size),
        "reference": reference_name,
        **_shape(model, forest),
    }

    def row(measured: dict[str, Measured]) -> Row:
        contestants = {
            name: {"skipped": each} if isinstance(each, str) else _record(each, measured[name], forest, facts)
            for name, each in made.items()
        }
        return {**facts, "contestants": contestants, "speed_up": speed_ups(measured)}

    measured = measure(
        model,
        {name: partial(each.step, pace.part) for name, each in ready.items()},
        settings.repetitions,
        wide,
        pace=pace,
        on_step=lambda measured: on_partial(row(measured)),
        on_error=on_error,
    )
    check_losses(measured, model.dtype)
    return row(measured)


def _announcement(
    workload: Workload, forest: Forest, names: Sequence[str], flops: FlopModel, settings: Settings, rate: float | None
) -> str:
    """What is going to be measured, and how long that takes."""
    count = num(len(workload.trajectories), "trajectory", "trajectories")
    if workload.num_left_out:
        every = len(workload.trajectories) + workload.num_left_out
        count = f"{len(workload.trajectories):,} of its {every:,} trajectories, as all would take too long"
    times = []
    if rate is not None:
        seconds = round_flops(workload.trajectories, flops, settings) / rate
        least, most = (duration(rounds * seconds) for rounds in (LEAST_ROUNDS, 1 + settings.repetitions))
        times.append(f"some {least}" if least == most else f"some {least} to {most}")
    if settings.max_seconds < math.inf:
        times.append(f"at most {duration(settings.max_seconds)}")
    return (
        f"{count}, {forest.num_flat_tokens:,} flat tokens, {forest.num_tokens:,} of the tree; {', '.join(names)} in "
        f"turns, a step to warm up and {num(settings.repetitions, 'step')} each where time allows: {', '.join(times)}"
    ).removesuffix(": ")


def check_losses(measured: dict[str, Measured], dtype: torch.dtype) -> None:
    """Raises where flat training and treewise differ; rows of others that do are left out, with both losses."""
    losses = {name: each.loss for name, each in measured.items() if each.skipped is None}
    first, expected = next(iter(losses.items()), ("", 0.0))
    for name, loss in losses.items():
        if not abs(loss - expected) <= LOSS_TOLERANCE[dtype] * max(1.0, abs(expected)):
            what = f"loss {loss:.6f}, {first} {expected:.6f}"
            if not name.startswith(("trl", "tree-recurrence")):
                raise VerificationError(f"{name} has {what}: they do not compute the same.")
            measured[name].skipped = f"does not compute this model: {what}"


def speed_ups(measured: dict[str, Measured]) -> dict[str, dict[str, float]]:
    """For each baseline that ran, its seconds / those of each other contestant, by medians."""
    ran = {name: each for name, each in measured.items() if each.skipped is None and each.seconds}
    seconds = {name: spread(each.seconds)["median"] for name, each in ran.items()}
    return {
        base: {name: seconds[base] / value for name, value in seconds.items() if name != base}
        for base in seconds
        if not is_ours(base)
    }


def _reference(
    model: PreTrainedModel, forest: Forest, name: str, processor: object, pace: Pace
) -> tuple[Gradients | None, str]:
    """Gradients of a wide copy in host memory, or None where the first contestant is the reference; and its name."""
    if name not in REFERENCES:
        raise ConfigError(f"--reference {name!r} is unknown; choose one of {', '.join(REFERENCES)}.")
    if name == "auto":
        name = "float32" if model.dtype in HALF else "flat"
    if name == "flat":
        return None, "the first contestant"
    try:
        with limited_to_free(model.device):
            wide = copy.deepcopy(model).to(getattr(torch, name))
            wide.zero_grad(set_to_none=True)
            rows = FlatRows(
                plain_parts(wide),
                merged_trajectories(forest),
                max_row_tokens=1,
                packs=False,
                is_checkpointed=model.device.type == "cuda",  # where memory is scarcer than time
                processor=processor,
            )
            with busy_with(REFERENCE), pace.first_step(REFERENCE, model.device):
                rows.step(pace.part)
    except TooSlow as error:
        pace.on_line(f"{REFERENCE}, flat training of a {name} copy: {error}")
        return None, f"the first contestant (a {name} copy was {error})"
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, f"the first contestant (a {name} copy ran out of memory)"
    pace.on_line(f"{REFERENCE}, flat training of a {name} copy, took {pace.elapsed:.3g} s")
    return gradients_of(wide, torch.device("cpu")), f"flat training of a {name} copy"


# -- what a row holds -------------------------------------------------------------------------------------------------


def _shape(model: PreTrainedModel, forest: Forest) -> Row:
    """How large a forest is, what its trees share, and the most that this can save."""
    flops = flop_model(model)
    tree = flops.tree(forest)
    return {
        "num_parameters": flops.num_parameters,
        "num_trajectories": forest.num_trajectories,
        "num_segments": len(forest.segments.start),
        "flat_tokens": forest.num_flat_tokens,
        "tree_tokens": forest.num_tokens,
        "share_ratio": forest.share_ratio,
        "leaf_ratio": forest.leaf_ratio,
        "pair_ratio": forest.pair_ratio,
        "flop_bound": flops.flat(forest) / tree,
        "leaf_flop_bound": flops.leaf(forest) / tree,
        "tree_flops": tree,
    }


def _record(contestant: Contestant, measured: Measured, forest: Forest, facts: Row) -> Row:
    note = {} if contestant.note is None else {"note": contestant.note}
    if measured.skipped is not None:
        return {"skipped": measured.skipped, **note}
    if math.isnan(measured.first_seconds):
        return {"skipped": "not measured: the run was cut short", **note}
    seconds = spread(measured.seconds or [measured.first_seconds])
    return {
        "seconds": seconds,
        "first_seconds": measured.first_seconds,
        "flat_tokens_per_second": forest.num_flat_tokens / seconds["median"],
        "computed_tokens": contestant.num_computed_tokens,
        "computed_tokens_per_second": contestant.num_computed_tokens / seconds["median"],
        "mfu": _mfu(contestant, seconds["median"], facts),
        "micro_batches": contestant.num_micro_batches,
        "held_tokens": contestant.num_held_tokens,
        "recomputed_tokens": contestant.num_recomputed_tokens,
        "bound_of_tree": contestant.bound,
        "peak_bytes": measured.peak_bytes,
        "gradient_error": measured.gradient_error,
        "loss": measured.loss,
        "host_seconds": contestant.host_seconds,
        "key_rows_per_token": contestant.key_rows_per_token,
        **({} if contestant.kernel is None else {"kernel": asdict(contestant.kernel)}),
        **note,
        **({} if measured.seconds else {"is_first_step_alone": True}),
    }


def _mfu(contestant: Contestant, seconds: float, facts: Row) -> float | None:
    """Model FLOPs that the contestant's rows need, each once, per second, over what products of the model's width reach
    on this device. Recomputation does not count; None for rows whose FLOPs are not known."""
    rate = facts["product_flops"]
    return None if rate is None or contestant.flops is None else contestant.flops / seconds / rate
