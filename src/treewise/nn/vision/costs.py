"""What tower and projector cost for an image, from a model's configuration and the shapes of its parameters.

An image of R feature rows is R * patches_per_row patches. The tower's matrices and attention see the patches, the
projector's matrices the rows. Class tokens, resizing of positions and pooling heads are left out.

Letters: I images, R feature rows of one.
"""

import inspect
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from treewise.nn.vision.pixels import image_token_of
from treewise.planning.partition import ATTENTION_BACKWARD
from treewise.tree.forest import Forest

# Modules that see feature rows; all others outside of the decoder see patches.
_ON_ROWS = re.compile(
    r"(?<!patch_embed\.)(?<!embeddings\.)project|connector|merger|aligner|embed_vision|adapter|resampler|patch_merge"
)
_LEFT_OUT = re.compile(r"position|pos_embed|rel_pos|class_embed|\.head\.|audio|video|vqmodel|generation")
# Arguments of towers that take images of any size whole; others take squares of one size.
_ANY_SIZE = {"image_grid_thw", "spatial_shapes", "image_position_ids"}


@dataclass(frozen=True, slots=True)
class VisionCosts:
    """FLOPs of a tower and its projector.

    image_token: the placeholder. linear, linear_backward: per feature row. pairs: for layers in which so many patches
    attend to each other (None: all of an image), FLOPs of a pair's forward over all these layers. is_tower_trained:
    whether a gradient goes through attention. activation_values: an estimate of the values kept per row for the
    backward; 0 where nothing is trained.
    """

    image_token: int
    patches_per_row: float
    linear: float
    linear_backward: float
    pairs: tuple[tuple[int | None, float], ...]
    is_tower_trained: bool
    activation_values: float

    def rows_of(self, forest: Forest) -> np.ndarray:
        """[I] int64, feature rows of each image on a forest."""
        before = np.concatenate([[0], np.cumsum(forest.token_ids == self.image_token)])
        return before[forest.images.end] - before[forest.images.start]

    def forward(self, rows: np.ndarray) -> np.ndarray:
        """[I] float64, FLOPs of one pass for images of so many rows ([I] int64)."""
        return self.linear * rows + self._attention(rows)

    def step(self, rows: np.ndarray) -> np.ndarray:
        """[I] float64, FLOPs of one forward and backward for images of so many rows ([I] int64)."""
        backward = ATTENTION_BACKWARD * self._attention(rows) if self.is_tower_trained else 0.0
        return self.forward(rows) + self.linear_backward * rows + backward

    def _attention(self, rows: np.ndarray) -> np.ndarray:
        patches = self.patches_per_row * rows
        total = np.zeros(len(rows))
        for reach, flops in self.pairs:
            total += flops * patches * (patches if reach is None else np.minimum(patches, reach))
        return total


def vision_costs(model: Any, activations_per_linear: float) -> VisionCosts | None:
    """The costs of a transformers model's tower; None for a model without one. `meta` tensors will do.

    activations_per_linear: values kept for the backward, per input and output of a linear layer.
    """
    config = model.config
    vision, token = getattr(config, "vision_config", None), image_token_of(config)
    module = getattr(model, "base_model", model)
    if (
        vision is None
        or token is None
        or config.get_text_config() is config
        or not hasattr(module, "get_image_features")
    ):
        return None
    per_row = _patches_per_row(config, vision)
    not_seen = {id(each) for part in (model.get_decoder(), model.get_output_embeddings()) for each in part.parameters()}
    linear = backward = activations = 0.0
    is_trained = is_tower_trained = False
    for name, parameter in model.named_parameters():
        if id(parameter) in not_seen or parameter.ndim < 2 or not name.endswith("weight") or _LEFT_OUT.search(name):
            continue
        is_on_rows = bool(_ON_ROWS.search(name))
        count = 1.0 if is_on_rows else per_row
        linear += 2.0 * parameter.numel() * count
        backward += 2.0 * parameter.numel() * count * (1 + parameter.requires_grad)
        activations += (parameter.shape[0] + parameter.numel() / parameter.shape[0]) * count * activations_per_linear
        is_trained |= parameter.requires_grad
        is_tower_trained |= parameter.requires_grad and not is_on_rows
    return VisionCosts(
        image_token=token,
        patches_per_row=per_row,
        linear=linear,
        linear_backward=backward if is_trained else 0.0,
        pairs=_pairs(module, vision),
        is_tower_trained=is_tower_trained,
        activation_values=activations if is_trained else 0.0,
    )


def _patches_per_row(config: Any, vision: Any) -> float:
    """Patches of the tower that one feature row stands for."""
    if num_rows := getattr(config, "mm_tokens_per_image", None):
        return _tile(vision) / num_rows
    for where in (vision, config):
        for name in ("spatial_merge_size", "scale_factor", "downsample_factor", "pooling_kernel_size"):
            if factor := getattr(where, name, None):
                return float(factor) ** 2
        for name in ("downsample_ratio", "pixel_shuffle_ratio"):
            if ratio := getattr(where, name, None):
                return 1.0 / ratio**2
    return 1.0


def _pairs(module: nn.Module, vision: Any) -> tuple[tuple[int | None, float], ...]:
    names = {"num_hidden_layers", "depth", "num_layers"}
    num_layers = next((value for name in sorted(names) if (value := getattr(vision, name, None))), 0)
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    known = set(inspect.signature(module.get_image_features).parameters)  # type: ignore[arg-type]
    is_whole = bool(known & _ANY_SIZE) or (
        "image_sizes" in known and not hasattr(module.config, "image_grid_pinpoints")
    )
    reach = None if is_whole else _tile(vision)
    full = getattr(vision, "fullatt_block_indexes", None)
    if full is None or not getattr(vision, "window_size", None):
        return ((reach, 4.0 * width * num_layers),)
    window = (vision.window_size // vision.patch_size) ** 2
    return (reach, 4.0 * width * len(full)), (window, 4.0 * width * (num_layers - len(full)))


def _tile(vision: Any) -> int:
    """Patches of a square image of the tower's size."""
    side, patch = (
        value[0] if isinstance(value, list | tuple) else value for value in (vision.image_size, vision.patch_size)
    )
    return int(side // patch) ** 2
