"""FLOPs of a tower and its projector, by the feature rows of an image; conventions as in `nn.flops`.

Letters: I images on a forest.
"""

from dataclasses import dataclass

import numpy as np

from treewise.planning.partition import ATTENTION_BACKWARD
from treewise.tree.forest import Forest

PerRow = tuple[float, float]  # a, b of FLOPs `a * R + b * R**2`
NO_FLOPS: PerRow = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class VisionCosts:
    """FLOPs of a tower and its projector.

    image_token: the placeholder. linear, linear_backward: of products with weights. attention: its forward.
    is_attention_trained: whether a gradient goes through it. activation_values: an estimate of the values kept per row
    for the backward; 0 where nothing is trained.
    """

    image_token: int
    linear: PerRow = NO_FLOPS
    linear_backward: PerRow = NO_FLOPS
    attention: PerRow = NO_FLOPS
    is_attention_trained: bool = False
    activation_values: float = 0.0

    @property
    def is_trained(self) -> bool:
        """Whether a step runs a backward of tower or projector."""
        return self.linear_backward != NO_FLOPS

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


def _flops(per_row: PerRow, rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = per_row[0] * rows + per_row[1] * rows.astype(np.float64) ** 2
    return found
