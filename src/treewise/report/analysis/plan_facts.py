"""Facts about a plan, and what it should cost on a model."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from treewise.nn.flops import FlopModel, gateway_bytes
from treewise.planning.planner import Plan

ADAMW_VALUES = 2  # moments kept per trained parameter


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan, and what it should cost on a model. Bytes and times are predictions from shapes, not measurements.

    relative_time: FLOPs of the plan / FLOPs of flat training; relative_tree_time: / those of the tree in one
    micro-batch. bytes_*: of the model's dtype, gradients of gateways in float32; bytes_peak adds weights, gradients,
    AdamW's moments, one micro-batch with what is held, the graph of the images where it is kept beside (bytes_images),
    the gateways, and the logits and the head's gradient in the backward of log-probs (bytes_head).
    """

    max_tokens: int | None
    num_trees: int
    num_flat_tokens: int
    num_tree_tokens: int
    num_micro_batches: int
    num_open_tokens: int
    num_held_tokens: int
    num_recomputed_tokens: int
    num_computed_tokens: int
    peak_live_tokens: int
    peak_gateway_tokens: int
    model: str | None = None
    dtype: str | None = None
    bytes_per_gateway_token: int | None = None
    bytes_weights: int | None = None
    bytes_activations: int | None = None
    bytes_images: int | None = None
    bytes_head: int | None = None
    bytes_gateways: int | None = None
    bytes_peak: int | None = None
    relative_time: float | None = None
    relative_leaf_time: float | None = None
    relative_tree_time: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable names."""
        return asdict(self)


def report_plan(
    plan: Plan, flops: FlopModel | None = None, model: str | None = None, dtype: str = "float32"
) -> PlanReport:
    """Facts of a plan, with predictions where a model is known."""
    live = max(tokens for _, tokens in plan.timeline)
    predictions: dict[str, Any] = {}
    if flops is not None:
        width = getattr(torch, dtype).itemsize
        per_token = gateway_bytes(flops.gateway_values, getattr(torch, dtype))
        trained = flops.num_trained_parameters * (1 + ADAMW_VALUES)
        weights = width * (flops.num_parameters + trained)
        precision = getattr(torch, dtype)
        activations, gateways = flops.token_bytes(precision) * live, per_token * plan.peak_gateway_tokens
        head = flops.head_bytes(live, precision)
        images = width * flops.kept_image_values(plan)
        predictions = {
            "model": model,
            "dtype": dtype,
            "bytes_per_gateway_token": per_token,
            "bytes_weights": weights,
            "bytes_activations": activations,
            "bytes_images": images,
            "bytes_head": head,
            "bytes_gateways": gateways,
            "bytes_peak": weights + activations + images + gateways + head,
            "relative_time": flops.planned(plan) / flops.flat(plan.forest),
            "relative_leaf_time": flops.planned(plan) / flops.leaf(plan.forest),
            "relative_tree_time": flops.planned(plan) / flops.tree(plan.forest),
        }
    return PlanReport(
        max_tokens=plan.max_tokens,
        num_trees=plan.forest.num_trees,
        num_flat_tokens=plan.forest.num_flat_tokens,
        num_tree_tokens=plan.forest.num_tokens,
        num_micro_batches=plan.num_micro_batches,
        num_open_tokens=plan.num_open_tokens,
        num_held_tokens=plan.num_held_tokens,
        num_recomputed_tokens=plan.num_recomputed_tokens,
        num_computed_tokens=plan.num_computed_tokens,
        peak_live_tokens=live,
        peak_gateway_tokens=plan.peak_gateway_tokens,
        **predictions,
    )
