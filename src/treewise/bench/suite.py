"""One workload on one model: every contestant measured, and what that says beside the FLOP bounds."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from treewise.bench.contestants import AGAINST, Contestant, builders, plain_parts, prepare, twin, values_per_token
from treewise.bench.flat import FlatRows, merged_trajectories
from treewise.bench.measure import Gradients, Measured, gradients, measure, spread
from treewise.bench.results import is_ours
from treewise.bench.varlen import kernel
from treewise.bench.workloads import Workload
from treewise.errors import ConfigError, OutOfMemoryError, VerificationError, bytes_as_text
from treewise.nn.device import free_bytes, is_out_of_memory
from treewise.nn.flops import flop_model
from treewise.tree.forest import Forest

REFERENCES = ("auto", "flat", "float32", "float64")
HALF = (torch.bfloat16, torch.float16)
# How far losses of contestants may be from the first one's before the comparison is called off, by dtype.
LOSS_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def measure_workload(
    model: nn.Module,
    workload: Workload,
    *,
    against: Sequence[str] = AGAINST,
    max_tokens: Sequence[int] | None = None,
    repetitions: int = 3,
    attention: str = "auto",
    with_checkpointing: bool = False,
    row_tokens: int | None = None,
    reference: str = "auto",
    max_seconds: float = math.inf,
) -> dict[str, Any]:
    """Plain JSON values: the workload, its ratios and bounds, and a record for each contestant.

    model: a transformers causal language model that treewise has not seen yet. max_tokens: budgets; the workload's own,
    or a quarter of the tree, where not given. reference: of the gradient errors; `flat` is the first contestant,
    `float32` and `float64` are merged flat training of a wider copy, `auto` takes a float32 copy of half-precision
    models and `flat` for others. max_seconds: no further repetition begins after them.

    Raises:
        VerificationError: contestants whose losses differ, so they would not be doing the same work.
    """
    items = list(workload.trajectories)
    forest = Forest.from_trajectories(items)
    budgets = _budgets(workload, forest) if max_tokens is None else list(max_tokens)
    wide, reference_name = _reference(model, forest, reference)
    made = {
        name: prepare(build)
        for name, build in builders(
            model,
            items,
            against=against,
            max_tokens=budgets,
            attention=attention,
            with_checkpointing=with_checkpointing,
            row_tokens=row_tokens,
        ).items()
    }
    ready = {name: each for name, each in made.items() if isinstance(each, Contestant)}
    found = measure(model, {name: each.step for name, each in ready.items()}, repetitions, wide, max_seconds)
    _refuse_different_losses(found, _dtype(model))
    parameter = next(model.parameters())
    return {
        "workload": workload.name,
        "dtype": str(_dtype(model)).removeprefix("torch."),
        "device": parameter.device.type,
        "varlen_kernel": kernel(parameter.device.type, _dtype(model)),
        "reference": reference_name,
        **_shape(model, forest),
        "contestants": {
            name: {"skipped": each} if isinstance(each, str) else _record(each, found[name], forest)
            for name, each in made.items()
        },
        "speed_up": speed_ups(found),
    }


def speed_ups(found: dict[str, Measured]) -> dict[str, dict[str, float]]:
    """For each baseline that ran, how many times faster each other contestant is, by medians."""
    seconds = {name: spread(each.seconds)["median"] for name, each in found.items() if each.skipped is None}
    return {
        base: {name: seconds[base] / value for name, value in seconds.items() if name != base}
        for base in seconds
        if not is_ours(base)
    }


def _shape(model: nn.Module, forest: Forest) -> dict[str, Any]:
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


def _record(made: Contestant, found: Measured, forest: Forest) -> dict[str, Any]:
    if found.skipped is not None:
        return {"skipped": found.skipped}
    seconds = spread(found.seconds)
    return {
        "seconds": seconds,
        "flat_tokens_per_second": forest.num_flat_tokens / seconds["median"],
        "computed_tokens": made.num_computed_tokens,
        "micro_batches": made.num_micro_batches,
        "held_tokens": made.num_held_tokens,
        "recomputed_tokens": made.num_recomputed_tokens,
        "peak_bytes": found.peak_bytes,
        "gradient_error": found.gradient_error,
        "loss": found.loss,
        "host_seconds": made.host_seconds,
        "key_rows_per_token": made.key_rows_per_token,
    }


def _budgets(workload: Workload, forest: Forest) -> list[int]:
    return list(workload.max_tokens) or [max(1, forest.num_tokens // 4)]


def _refuse_different_losses(found: dict[str, Measured], dtype: torch.dtype) -> None:
    losses = {name: each.loss for name, each in found.items() if each.skipped is None}
    first = next(iter(losses), None)
    for name, loss in losses.items():
        assert first is not None
        if not abs(loss - losses[first]) <= LOSS_TOLERANCE[dtype] * max(1.0, abs(losses[first])):
            raise VerificationError(f"{name} has loss {loss:.6f}, {first} {losses[first]:.6f}: not the same work.")


# -- the reference of the gradients -----------------------------------------------------------------------------------


def _reference(model: nn.Module, forest: Forest, name: str) -> tuple[Gradients | None, str]:
    """Gradients of a wide copy in host memory, or None where the first contestant is the reference; and its name."""
    if name not in REFERENCES:
        raise ConfigError(f"--reference {name!r} is unknown; choose out of {', '.join(REFERENCES)}.")
    own = _dtype(model)
    if name == "auto":
        name = "float32" if own in HALF else "flat"
    if name == "flat":
        return None, "the first contestant"
    dtype = getattr(torch, name)
    size = torch.empty(0, dtype=dtype).element_size()
    longest = int(forest.path_lengths.max())
    flops = flop_model(model)
    device = next(model.parameters()).device
    is_checkpointed = device.type == "cuda"  # where memory is scarcer than time
    needed = size * (2 * flops.num_parameters + longest * values_per_token(model, is_checkpointed))
    free = free_bytes(device)
    if needed > free:
        why = f"a {name} copy needs {bytes_as_text(needed)}, of which {bytes_as_text(free)} are free"
        return None, f"the first contestant ({why})"
    wide = copy.deepcopy(model).to(dtype)
    wide.zero_grad(set_to_none=True)
    rows = FlatRows(
        plain_parts(wide), merged_trajectories(forest), max_row_tokens=1, packs=False, is_checkpointed=is_checkpointed
    )
    try:
        rows.step()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, f"the first contestant (a {name} copy ran out of memory)"
    return gradients(wide), f"flat training of a {name} copy"


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


# -- many ------------------------------------------------------------------------------------------------------------


def run(
    model_of: Callable[[], nn.Module],
    name: str,
    workloads_of: Callable[[int], Iterable[Workload]],
    tell: Callable[[dict[str, Any]], None],
    **how: Any,
) -> None:
    """Every workload on one model; a row for each, told as soon as it is there.

    workloads_of: from the size of the vocabulary. A model that does not fit in memory gives one row that says so, and a
    workload whose contestants do not agree another. how: see `measure_workload`.

    Raises:
        VerificationError: contestants whose losses differ, once all workloads are measured.
    """
    try:
        model = model_of()
    except OutOfMemoryError as error:
        tell({"model": name, "skipped": str(error)})
        return
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    failures: list[VerificationError] = []
    for workload in workloads_of(vocabulary):
        try:
            tell({"model": name, **measure_workload(twin(model), workload, **how)})
        except VerificationError as error:
            failures.append(error)
            tell({"model": name, "workload": workload.name, "skipped": str(error)})
    if failures:
        raise failures[0]
