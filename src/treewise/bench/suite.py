"""Workloads on a model: every contestant measured, beside the FLOP bounds."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from treewise.bench.contestants import Contestant, Settings, builders, plain_parts, prepare, twin
from treewise.bench.flat import HALF, FlatRows, kernel, merged_trajectories
from treewise.bench.measure import Gradients, Measured, gradients, limited_to_free, measure, spread
from treewise.bench.results import is_ours
from treewise.bench.workloads import Workload
from treewise.errors import ConfigError, OutOfMemoryError, VerificationError
from treewise.nn.device import is_out_of_memory
from treewise.nn.model_flops import flop_model
from treewise.tree.forest import Forest

REFERENCES = ("auto", "flat", "float32", "float64")
# Relative difference of a contestant's loss from the first one's beyond which the comparison fails, by dtype.
LOSS_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
Row = dict[str, Any]  # of a file of results


def run(
    model_of: Callable[[], PreTrainedModel],
    name: str,
    workloads_of: Callable[[int], Iterable[Workload]],
    on_row: Callable[[Row], None],
    settings: Settings,
) -> None:
    """Measures every workload on one model; `on_row` is called with each row as soon as it is complete.

    workloads_of: from the size of the vocabulary. A model that does not fit in
    memory gives one row with the reason under `skipped`; so does a workload whose contestants differ in their losses.

    Raises:
        VerificationError: contestants whose losses differ, once all workloads are measured.
    """
    try:
        model = model_of()
    except OutOfMemoryError as error:
        on_row({"model": name, "skipped": str(error)})
        return
    failures: list[VerificationError] = []
    for workload in workloads_of(model.get_input_embeddings().weight.shape[0]):
        try:
            on_row({"model": name, **measure_workload(twin(model), workload, settings)})
        except VerificationError as error:
            failures.append(error)
            on_row({"model": name, "workload": workload.name, "skipped": str(error)})
    if failures:
        raise failures[0]


def measure_workload(model: PreTrainedModel, workload: Workload, settings: Settings) -> Row:
    """Plain JSON values: the workload, its ratios and bounds, and a record for each contestant.

    model: a transformers causal language model without treewise installed on it.

    Raises:
        VerificationError: contestants whose losses differ, so they do not compute the same.
    """
    items, processor = list(workload.trajectories), workload.processor
    forest = Forest.from_trajectories(items)
    budgets: Sequence[int] = workload.max_tokens or [max(1, forest.num_tokens // 4)]
    if settings.max_tokens is not None:
        budgets = settings.max_tokens
    wide, reference_name = _reference(model, forest, settings.reference, processor)
    made = {name: prepare(build) for name, build in builders(model, items, settings, budgets, processor).items()}
    steps = {name: each.step for name, each in made.items() if isinstance(each, Contestant)}
    measured = measure(model, steps, settings.repetitions, wide, settings.max_seconds)
    check_losses(measured, model.dtype)
    return {
        "workload": workload.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "varlen_kernel": kernel(model.device.type, model.dtype),
        "reference": reference_name,
        **_shape(model, forest),
        "contestants": {
            name: {"skipped": each} if isinstance(each, str) else _record(each, measured[name], forest)
            for name, each in made.items()
        },
        "speed_up": speed_ups(measured),
    }


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
    seconds = {name: spread(each.seconds)["median"] for name, each in measured.items() if each.skipped is None}
    return {
        base: {name: seconds[base] / value for name, value in seconds.items() if name != base}
        for base in seconds
        if not is_ours(base)
    }


def _reference(model: PreTrainedModel, forest: Forest, name: str, processor: object) -> tuple[Gradients | None, str]:
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
            FlatRows(
                plain_parts(wide),
                merged_trajectories(forest),
                max_row_tokens=1,
                packs=False,
                is_checkpointed=model.device.type == "cuda",  # where memory is scarcer than time
                processor=processor,
            ).step()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None, f"the first contestant (a {name} copy ran out of memory)"
    return gradients(wide), f"flat training of a {name} copy"


# -- what a row holds -------------------------------------------------------------------------------------------------


def _shape(model: PreTrainedModel, forest: Forest) -> Row:
    """Ratios and FLOP bounds."""
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


def _record(contestant: Contestant, measured: Measured, forest: Forest) -> Row:
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
