"""Workloads on a model: every contestant measured, beside the FLOP bounds and what the peak of a known GPU allows."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from treewise.bench.contestants import Contestant, Settings, builders, plain_parts, prepare, twin
from treewise.bench.flat import HALF, FlatRows, kernel, merged_trajectories
from treewise.bench.images import ImageFormat, image_format, tower_seconds
from treewise.bench.measure import Gradients, Measured, gradients, limited_to_free, measure, spread
from treewise.bench.results import is_ours
from treewise.bench.workloads import Workload
from treewise.errors import ConfigError, OutOfMemoryError, VerificationError
from treewise.nn.attention import TreeMask
from treewise.nn.attention.flex import BLOCK_SIZE, num_key_rows
from treewise.nn.device import is_out_of_memory
from treewise.nn.flops import FlopModel, LayerReach, flat_head_rows, flop_model, tree_head_rows
from treewise.planning.layout import lay_out
from treewise.planning.partition import ATTENTION_BACKWARD
from treewise.planning.planner import plan
from treewise.tree.forest import Forest

REFERENCES = ("auto", "flat", "float32", "float64")
# Relative difference of a contestant's loss from the first one's beyond which the comparison fails, by dtype.
LOSS_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
Row = dict[str, Any]  # of a file of results
ITEM_BYTES = 2  # bfloat16


def run(
    model_of: Callable[[], PreTrainedModel],
    name: str,
    workloads_of: Callable[[int, ImageFormat | None], Iterable[Workload]],
    on_row: Callable[[Row], None],
    settings: Settings,
) -> None:
    """Measures every workload on one model; `on_row` is called with each row as soon as it is complete.

    workloads_of: from the size of the vocabulary and the format of the model's images. A model that does not fit in
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
    for workload in workloads_of(model.get_input_embeddings().weight.shape[0], image_format(model)):
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
        **(_seen(model, forest, processor, settings.repetitions, measured) if len(forest.images) else {}),
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
    """Ratios, FLOP bounds, and on a known GPU the seconds that its peak and bandwidth allow."""
    flops = flop_model(model)
    tree, gpu = flops.tree(forest), None
    if model.device.type == "cuda" and {reach for reach, _ in flops.pair_forward} == {LayerReach()}:
        name = torch.cuda.get_device_name(model.device)
        gpu = next((gpu for key, gpu in GPUS.items() if key in name), None)
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
        **({} if gpu is None else {"bound_seconds": bound_seconds(flops, forest, gpu)}),
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


def _seen(
    model: PreTrainedModel, forest: Forest, processor: object, repetitions: int, measured: dict[str, Measured]
) -> Row:
    """Images of a workload, the seconds of the tower over the distinct ones, and their share of the step of `tree`."""
    seconds = spread(tower_seconds(twin(model), forest, processor, repetitions))
    tree = measured.get("tree")
    share = None if tree is None or tree.skipped else seconds["median"] / spread(tree.seconds)["median"]
    return {
        "images": len(forest.images.sources),
        "flat_images": sum(len(item.images) for item in forest.trajectories),
        "image_tokens": int((forest.images.end - forest.images.start).sum()),
        "tower_seconds": seconds,
        "tower_share": share,
    }


# -- what a GPU allows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gpu:
    """Dense bfloat16 FLOPs and bytes of memory, per second, from the vendor's data sheet.

    What they allow is a bound, not a forecast. Each part takes what its FLOPs take at the peak, or what its bytes take
    at the bandwidth, whichever is more. Attention counts whole blocks of 128 x 128, as FlexAttention computes them,
    with the keys and values of each block read once per key head; linear layers read their weights three times (forward
    and both gradients), write the gradients, and write and read the activations that are kept. Launches, norms, the
    optimizer and exchanges between GPUs are left out.
    """

    flops: float
    bandwidth: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Of one part."""
        return max(flops / self.flops, num_bytes / self.bandwidth)


GPUS = {
    "A100": Gpu(312e12, 2.04e12),
    "H100": Gpu(989e12, 3.35e12),
    "H200": Gpu(989e12, 4.8e12),
    "B200": Gpu(2_250e12, 8e12),
}


def bound_seconds(flops: FlopModel, forest: Forest, gpu: Gpu) -> dict[str, float]:
    """Of a step without a budget: `flat`, every trajectory alone in packed rows, and `tree`.

    flops: of a model whose attention looks back without windows or chunks.
    """
    lengths = -(-forest.path_lengths.astype(np.int64) // BLOCK_SIZE)
    mask = TreeMask.from_layout(lay_out(plan(forest), 0))
    # Tokens, projected rows, and blocks of attention.
    flat = forest.num_flat_tokens, flat_head_rows(forest), float((lengths * (lengths + 1) // 2).sum())
    tree = forest.num_tokens, tree_head_rows(forest), num_key_rows(mask, torch.device("cpu")) / BLOCK_SIZE
    return {"flat": _seconds(flops, gpu, *flat), "tree": _seconds(flops, gpu, *tree)}


def _seconds(flops: FlopModel, gpu: Gpu, num_tokens: int, num_rows: int, num_blocks: float) -> float:
    weights, activations = flops.linear / 2 * 4, 2 * flops.activation_values * num_tokens
    linear = gpu.seconds((flops.linear + flops.linear_backward) * num_tokens, (weights + activations) * ITEM_BYTES)
    head = gpu.seconds((flops.head + flops.head_backward) * num_rows, 2 * flops.head * ITEM_BYTES)
    pairs = num_blocks * BLOCK_SIZE**2 * sum(pair for reach, pair in flops.pair_forward if reach == LayerReach())
    moved = flops.gateway_values * (num_blocks * BLOCK_SIZE + num_tokens) * ITEM_BYTES  # keys and values, all layers
    return linear + head + gpu.seconds(pairs, moved) + gpu.seconds(ATTENTION_BACKWARD * pairs, 2 * moved)
