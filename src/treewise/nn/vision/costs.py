"""What tower and projector cost for an image, by its feature rows.

Products are counted for images of two sizes (`tower_flops`). From these FLOPs are `a * rows + b * rows**2`: weights
see each patch, attention pairs of patches. For a tower that takes squares of one size (tiles), `b` is 0.

Letters: I images, R feature rows of one.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treewise.nn.model import base_model
from treewise.nn.vision.pixels import image_token_of
from treewise.nn.vision.tower_flops import TowerCount, count_tower
from treewise.planning.partition import ATTENTION_BACKWARD
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")
PerRow = tuple[float, float]  # a, b of FLOPs `a * R + b * R**2`
_NONE: PerRow = (0.0, 0.0)
_costs_of: dict[tuple[Any, ...], "VisionCosts"] = {}


@dataclass(frozen=True, slots=True)
class VisionCosts:
    """FLOPs of a tower and its projector.

    image_token: the placeholder. linear, linear_backward: of products with weights. attention: its forward.
    is_attention_trained: whether a gradient goes through it. activation_values: an estimate of the values kept per row
    for the backward; 0 where nothing is trained.
    """

    image_token: int
    linear: PerRow = _NONE
    linear_backward: PerRow = _NONE
    attention: PerRow = _NONE
    is_attention_trained: bool = False
    activation_values: float = 0.0

    @property
    def is_trained(self) -> bool:
        """Whether a step runs a backward of tower or projector."""
        return self.linear_backward != _NONE

    def rows_of(self, forest: Forest) -> np.ndarray:
        """[I] int64, feature rows of each image on a forest."""
        before = np.concatenate([[0], np.cumsum(forest.token_ids == self.image_token)])
        return before[forest.images.end] - before[forest.images.start]

    def forward(self, rows: np.ndarray) -> np.ndarray:
        """[I] float64, FLOPs of one pass for images of so many rows ([I] int64)."""
        return _flops(self.linear, rows) + _flops(self.attention, rows)

    def step(self, rows: np.ndarray) -> np.ndarray:
        """[I] float64, FLOPs of one forward and backward for images of so many rows ([I] int64)."""
        backward = ATTENTION_BACKWARD * _flops(self.attention, rows) if self.is_attention_trained else 0.0
        return self.forward(rows) + _flops(self.linear_backward, rows) + backward


def vision_costs(model: Any, activations_per_linear: float) -> VisionCosts | None:
    """The costs of a transformers model's tower; None for a model without one. `meta` tensors will do.

    activations_per_linear: values kept for the backward, per input and output of a linear layer.
    """
    base: Any = base_model(model)
    config = base.config
    module, token = base.base_model, image_token_of(config)
    if token is None or config.get_text_config() is config:
        return None
    if not hasattr(module, "get_image_features"):
        return None
    not_seen = {id(each) for part in (model.get_decoder(), model.get_output_embeddings()) for each in part.parameters()}
    seen = [
        (name, tuple(each.shape), each.requires_grad)
        for name, each in model.named_parameters()
        if id(each) not in not_seen
    ]
    key = (type(module), config.to_json_string(), tuple(seen), activations_per_linear)
    if key not in _costs_of:
        is_trained = any(requires_grad for _, _, requires_grad in seen)
        _costs_of[key] = _fitted(token, count_tower(module), activations_per_linear * is_trained)
        if _costs_of[key].linear == _NONE:
            logger.warning(
                "%s: its vision tower does not run on meta tensors, so costs and plans leave images out.",
                type(model).__name__,
            )
    return _costs_of[key]


def _fitted(token: int, counts: Sequence[TowerCount], activations_per_linear: float) -> VisionCosts:
    if not counts:
        return VisionCosts(token)
    last = counts[-1]
    return VisionCosts(
        image_token=token,
        linear=_per_row(counts, lambda each: each.linear),
        linear_backward=_per_row(counts, lambda each: each.linear_backward),
        attention=_per_row(counts, lambda each: each.attention),
        is_attention_trained=last.attention_backward > 0,
        activation_values=activations_per_linear * last.values / last.rows,
    )


def _per_row(counts: Sequence[TowerCount], flops_of: Callable[[TowerCount], float]) -> PerRow:
    first, last = counts[0], counts[-1]
    slope = flops_of(last) / last.rows
    if first is last:
        return slope, 0.0
    square = max(0.0, (slope - flops_of(first) / first.rows) / (last.rows - first.rows))
    return slope - square * last.rows, square


def _flops(per_row: PerRow, rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = per_row[0] * rows + per_row[1] * rows.astype(np.float64) ** 2
    return found
