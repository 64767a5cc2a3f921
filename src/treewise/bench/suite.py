"""Workloads on a model: every contestant measured, beside the FLOP bounds."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from treewise.bench.contestants import AGAINST, Contestant, builders, plain_parts, prepare, twin, values_per_token
from treewise.bench.flat import FlatRows, merged_trajectories
from treewise.bench.images import ImageFormat, image_format, tower_seconds
from treewise.bench.measure import Gradients, Measured, gradients, measure, spread
from treewise.bench.prediction import bound_seconds, gpu_of
from treewise.bench.results import is_ours
from treewise.bench.varlen import kernel
from treewise.bench.workloads import Workload
from treewise.errors import ConfigError, OutOfMemoryError, VerificationError, bytes_as_text
from treewise.nn.device import free_bytes, is_out_of_memory
from treewise.nn.flops import FlopModel, LayerReach, flop_model
from treewise.tree.forest import Forest

REFERENCES = ("auto", "flat", "float32", "float64")
HALF = (torch.bfloat16, torch.float16)
# Relative difference of a contestant's loss from the first one's beyond which the comparison fails, by dtype.
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
    compile_backend: str | None = None,
) -> dict[str, Any]:
    """Plain JSON values: the workload, its ratios and bounds, and a record for each contestant.

    model: a transformers causal language model without treewise installed on it. max_tokens: budgets; where not given,
    the workload's own, or a quarter of the tree. reference: of the gradient errors; `flat` is the first contestant,
    `float32` and `float64` are merged flat training of a wider copy, `auto` takes a float32 copy of half-precision
    models and `flat` for others. max_seconds: no further repetition begins after them. compile_backend: each contestant
    also with compiled layers (see `builders`).

    Raises:
        VerificationError: contestants whose losses differ, so they do not compute the same.
    """
    items = list(workload.trajectories)
    forest = Forest.from_trajectories(items)
    budgets = _budgets(workload, forest) if max_tokens is None else list(max_tokens)
    wide, reference_name = _reference(model, forest, reference, workload.processor)
    prepared = {
        name: prepare(build)
        for name, build in builders(
            model,
            items,
            against=against,
            max_tokens=budgets,
            attention=attention,
            with_checkpointing=with_checkpointing,
            row_tokens=row_tokens,
            processor=workload.processor,
            compile_backend=compile_backend,
        ).items()
    }
    ready = {name: each for name, each in prepared.items() if isinstance(each, Contestant)}
    measured = measure(model, {name: each.step for name, each in ready.items()}, repetitions, wide, max_seconds)
    _check_losses(measured, _dtype(model))
    parameter = next(model.parameters())
    return {
        "workload": workload.name,
        "dtype": str(_dtype(model)).removeprefix("torch."),
        "device": parameter.device.type,
        "varlen_kernel": kernel(parameter.device.type, _dtype(model)),
        "reference": reference_name,
        **_shape(model, forest),
        "contestants": {
            name: {"skipped": each} if isinstance(each, str) else _record(each, measured[name], forest)
            for name, each in prepared.items()
        },
        "speed_up": speed_ups(measured),
        **_seen(model, workload, forest, repetitions, measured),
    }


def _seen(
    model: nn.Module, workload: Workload, forest: Forest, repetitions: int, measured: dict[str, Measured]
) -> dict[str, Any]:
    """Images of a workload, the seconds of the tower over the distinct ones, and their share of the step of `tree`."""
    if not len(forest.images):
        return {}
    seconds = spread(tower_seconds(twin(model), forest, workload.processor, repetitions))
    tree = measured.get("tree")
    share = None if tree is None or tree.skipped else seconds["median"] / spread(tree.seconds)["median"]
    return {
        "images": len(forest.images.sources),
        "flat_images": sum(len(item.images) for item in forest.trajectories),
        "image_tokens": int((forest.images.end - forest.images.start).sum()),
        "tower_seconds": seconds,
        "tower_share": share,
    }


def speed_ups(measured: dict[str, Measured]) -> dict[str, dict[str, float]]:
    """For each baseline that ran, its seconds / those of each other contestant, by medians."""
    seconds = {name: spread(each.seconds)["median"] for name, each in measured.items() if each.skipped is None}
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
        **_bound(model, flops, forest),
    }


def _bound(model: nn.Module, flops: FlopModel, forest: Forest) -> dict[str, Any]:
    """Seconds that the peak and the bandwidth of a known GPU allow, flat and on the tree."""
    device = next(model.parameters()).device
    gpu = gpu_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    has_full_attention = {reach for reach, _ in flops.pair_forward} == {LayerReach()}
    return {"bound_seconds": bound_seconds(flops, forest, gpu)} if gpu is not None and has_full_attention else {}


def _record(contestant: Contestant, measured: Measured, forest: Forest) -> dict[str, Any]:
    if measured.skipped is not None:
        return {"skipped": measured.skipped}
    seconds = spread(measured.seconds)
    return {
        "seconds": seconds,
        "first_seconds": measured.first_seconds,
        "flat_tokens_per_second": forest.num_flat_tokens / seconds["median"],
        "computed_tokens": contestant.num_computed_tokens,
        "micro_batches": contestant.num_micro_batches,
        "held_tokens": contestant.num_held_tokens,
        "recomputed_tokens": contestant.num_recomputed_tokens,
        "bound_of_tree": contestant.bound,
        "peak_bytes": measured.peak_bytes,
        "gradient_error": measured.gradient_error,
        "loss": measured.loss,
        "host_seconds": contestant.host_seconds,
        "key_rows_per_token": contestant.key_rows_per_token,
    }


def _budgets(workload: Workload, forest: Forest) -> list[int]:
    return list(workload.max_tokens) or [max(1, forest.num_tokens // 4)]


def _check_losses(measured: dict[str, Measured], dtype: torch.dtype) -> None:
    """Raises where flat training and treewise differ; rows of others that do are left out, with both losses."""
    losses = {name: each.loss for name, each in measured.items() if each.skipped is None}
    first = next(iter(losses), None)
    for name, loss in losses.items():
        assert first is not None
        if not abs(loss - losses[first]) <= LOSS_TOLERANCE[dtype] * max(1.0, abs(losses[first])):
            what = f"loss {loss:.6f}, {first} {losses[first]:.6f}"
            if name.startswith(("trl", "tree-recurrence")):
                measured[name].skipped = f"does not compute this model: {what}"
            else:
                raise VerificationError(f"{name} has {what}: they do not compute the same.")


# -- the reference of the gradients -----------------------------------------------------------------------------------


def _reference(model: nn.Module, forest: Forest, name: str, processor: Any) -> tuple[Gradients | None, str]:
    """Gradients of a wide copy in host memory, or None where the first contestant is the reference; and its name."""
    if name not in REFERENCES:
        raise ConfigError(f"--reference {name!r} is unknown; choose one of {', '.join(REFERENCES)}.")
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
        plain_parts(wide),
        merged_trajectories(forest),
        max_row_tokens=1,
        packs=False,
        is_checkpointed=is_checkpointed,
        processor=processor,
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


# -- several ----------------------------------------------------------------------------------------------------------


def run(
    model_of: Callable[[], nn.Module],
    name: str,
    workloads_of: Callable[[int, ImageFormat | None], Iterable[Workload]],
    on_row: Callable[[dict[str, Any]], None],
    **options: Any,
) -> None:
    """Measures every workload on one model; `on_row` is called with each row as soon as it is complete.

    workloads_of: from the size of the vocabulary and the format of the model's images. A model that does not fit in
    memory gives one row with the reason under `skipped`; so does a workload whose contestants differ in their losses.
    options: see `measure_workload`.

    Raises:
        VerificationError: contestants whose losses differ, once all workloads are measured.
    """
    try:
        model = model_of()
    except OutOfMemoryError as error:
        on_row({"model": name, "skipped": str(error)})
        return
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    failures: list[VerificationError] = []
    for workload in workloads_of(vocabulary, image_format(model)):
        try:
            on_row({"model": name, **measure_workload(twin(model), workload, **options)})
        except VerificationError as error:
            failures.append(error)
            on_row({"model": name, "workload": workload.name, "skipped": str(error)})
    if failures:
        raise failures[0]
