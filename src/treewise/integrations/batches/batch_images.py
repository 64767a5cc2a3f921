"""The images of a batch: collators hand over pixels as a processor made them, and each image is recognised by these.

So the copies of a screenshot in several rows are one image of the tree.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from treewise.errors import num
from treewise.integrations.batches.batch_forest import BatchImages, NotShareable
from treewise.nn.support_table import own_table
from treewise.nn.vision import PixelInputs

PIXELS = "pixel_values"
# Arguments beside the pixels that tell their sizes, or which tokens are placeholders (as the token ids do).
OF_IMAGES = (PIXELS, "image_grid_thw", "image_sizes", "mm_token_type_ids", "token_type_ids")


def images_of_call(
    arguments: Mapping[str, Any], token_ids: np.ndarray, config: PretrainedConfig, token: int | None
) -> BatchImages:
    """The images of a batch, in the order of its rows.

    token_ids: [B, L] int64. config: of the whole model. token: the placeholder.

    Raises:
        NotShareable: tensors that do not show which image they belong to, or another number of placeholders
            than these have.
    """
    if token is None or config.model_type not in own_table().with_images():
        raise NotShareable(f"images of {config.model_type!r} are not supported")
    pixels: torch.Tensor = arguments[PIXELS]
    grid: torch.Tensor | None = arguments.get("image_grid_thw")
    if grid is not None:
        merged = getattr(config.vision_config, "spatial_merge_size", 0) ** 2
        if not merged:
            raise NotShareable(f"{config.model_type!r} does not tell how many placeholders an image has")
        counts: list[int] = (grid.prod(-1) // merged).tolist()
        parts: tuple[torch.Tensor, ...] = pixels.split(grid.prod(-1).tolist())
        each: list[PixelInputs] = [
            {PIXELS: part, "image_grid_thw": size[None]} for part, size in zip(parts, grid, strict=True)
        ]
    else:
        row, _ = np.nonzero(token_ids == token)
        counts, each = _of_equal_size(arguments, len(row))
    row, column = np.nonzero(token_ids == token)
    if sum(counts) != len(row):
        raise NotShareable(
            f"{num(len(each), 'image')} with {sum(counts)} placeholders stand beside {len(row)} image tokens"
        )
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    first, last = bounds[:-1], bounds[1:] - 1
    if (row[first] != row[last]).any():
        raise NotShareable("the placeholders of an image are in two rows")
    digests = tuple(_digest(tensors) for tensors in each)
    return BatchImages(row[first], column[first], column[last] + 1, digests, dict(zip(digests, each, strict=True)))


def _of_equal_size(arguments: Mapping[str, Any], num_placeholders: int) -> tuple[list[int], list[PixelInputs]]:
    """Placeholders and tensors of images that a processor brings to one size: one entry of `pixel_values` for each."""
    pixels: torch.Tensor = arguments[PIXELS]
    sizes: torch.Tensor | None = arguments.get("image_sizes")
    if pixels.dim() != 4 or num_placeholders % len(pixels):
        raise NotShareable(f"pixel_values of shape {tuple(pixels.shape)} do not tell which image is which")
    if sizes is not None and (sizes != sizes[0]).any():
        raise NotShareable("images of several sizes (image_sizes) stand in one batch")
    more = {} if sizes is None else {"image_sizes": sizes[:1]}
    return [num_placeholders // len(pixels)] * len(pixels), [{PIXELS: pixel[None], **more} for pixel in pixels]


def _digest(tensors: PixelInputs) -> str:
    state = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        state.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        state.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
