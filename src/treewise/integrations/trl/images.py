"""The images of a call with `fused_lm_head=True`: which placeholders each stands for, and its own pixel tensors.

TRL's collators hand over the pixels of a batch as their processor made them. Each image is recognised by its pixels,
so the copies of a screenshot in several rows are one image of the tree.

Letters: B rows of the batch, L tokens of a row, I images of the batch, P placeholders of the batch.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treewise.errors import num
from treewise.integrations.batch_forest import NotShareable
from treewise.nn.support_table import own_table
from treewise.nn.vision import PixelInputs
from treewise.tree.images import ImageSpan

PIXELS = "pixel_values"
# Arguments beside the pixels that tell their sizes, or which tokens are placeholders (as the token ids do).
OF_IMAGES = (PIXELS, "image_grid_thw", "image_sizes", "mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, slots=True)
class BatchImages:
    """The images of a batch.

    row, start, end: [I] int64, the tokens [start, end) of each in its row. digests: of each. pixels: the tensors of
    each distinct image, by digest.
    """

    row: np.ndarray
    start: np.ndarray
    end: np.ndarray
    digests: tuple[str, ...]
    pixels: Mapping[str, PixelInputs]

    def pixels_of(self, image: ImageSpan) -> PixelInputs:
        """The tensors of an image of the batch's forest."""
        return self.pixels[image.digest]


def images_of_call(arguments: Mapping[str, Any], token_ids: np.ndarray, config: Any, token: int | None) -> BatchImages:
    """The images of a batch, in the order of its rows.

    token_ids: [B, L] int64. config: of the whole model. token: the placeholder.

    Raises:
        NotShareable: tensors that do not show which image they belong to, or another number of placeholders
            than these have.
    """
    if token is None or config.model_type not in own_table().with_images():
        raise NotShareable(f"images of {config.model_type!r} are not supported")
    pixels, grid = arguments[PIXELS], arguments.get("image_grid_thw")
    if grid is not None:
        merged = getattr(config.vision_config, "spatial_merge_size", 0) ** 2
        if not merged:
            raise NotShareable(f"{config.model_type!r} does not tell how many placeholders an image has")
        counts = (grid.prod(-1) // merged).tolist()
        parts = pixels.split(grid.prod(-1).tolist())
        each = [{PIXELS: part, "image_grid_thw": size[None]} for part, size in zip(parts, grid, strict=True)]
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
    pixels, sizes = arguments[PIXELS], arguments.get("image_sizes")
    if pixels.dim() != 4 or num_placeholders % len(pixels):
        raise NotShareable(f"pixel_values of shape {tuple(pixels.shape)} do not tell which image is which")
    if sizes is not None and (sizes != sizes[0]).any():
        raise NotShareable("images of several sizes (image_sizes) stand in one batch")
    more = {} if sizes is None else {"image_sizes": sizes[:1]}
    return [num_placeholders // len(pixels)] * len(pixels), [{PIXELS: each[None], **more} for each in pixels]


def _digest(tensors: PixelInputs) -> str:
    state = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        state.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        state.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
