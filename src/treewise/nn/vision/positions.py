"""Position ids of trees whose images have places in two dimensions (three-axis rotary positions).

Such a model numbers an image's tokens by row and column, and goes on after it with less than the number of its tokens.
The positions of a trajectory are whatever the model's own function gives for it alone. A shared token has one position
on the tree, so all trajectories through it must agree; positions that depend on what comes later do not.

Letters: A axes, T tree tokens, L tokens of one trajectory, I images of one trajectory.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from treewise.errors import DataError, UnsupportedModelError
from treewise.nn.vision.pixels import PixelInputs
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan


def has_own_positions(module: Any) -> bool:
    """Whether a model numbers the tokens of images by its own function; else positions are depths."""
    return hasattr(module, "get_rope_index")


def tree_positions(
    module: Any, image_token: int, forest: Forest, pixels_of: Callable[[ImageSpan], PixelInputs]
) -> np.ndarray:
    """[A, T] int64, the position ids of all tree tokens. pixels_of: the tensors of an image.

    Raises:
        DataError: the model's function fails on a trajectory.
        UnsupportedModelError: trajectories disagree in the position of a token that they share.
    """
    rows = []
    for index, item in enumerate(forest.trajectories):
        pixels = [pixels_of(image) for image in item.images]
        try:
            rows.append(_row_positions(module, image_token, item.token_ids, pixels))
        except (RuntimeError, ValueError, IndexError, StopIteration) as error:
            raise DataError(
                f"{forest.source_of(index)}: {type(module).__name__} cannot number its tokens ({error}); are its "
                "images apart, with at least one token between?"
            ) from error
    num_axes = max((len(row) for row in rows if row.ndim == 2), default=1)
    positions = np.zeros((num_axes, forest.num_tokens), dtype=np.int64)
    for path, row in zip(forest.paths, rows, strict=True):
        positions[:, path] = row
    for index, (path, row) in enumerate(zip(forest.paths, rows, strict=True)):
        differs = (positions[:, path] != row).any(0)
        if differs.any():
            raise UnsupportedModelError(
                f"{forest.source_of(index)}: {type(module).__name__} gives token {int(np.argmax(differs))} another "
                "position than in a trajectory that shares it; a shared token has one position on a tree."
            )
    return positions


def _row_positions(module: Any, image_token: int, token_ids: np.ndarray, images: list[PixelInputs]) -> np.ndarray:
    """[A, L] int64 positions of one trajectory, or [L] where it has no image."""
    if not images:
        return np.arange(len(token_ids))
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    given: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == image_token).int()}
    given["attention_mask"] = torch.ones_like(ids)
    given |= {name: torch.cat([each[name] for each in images]) for name in images[0] if name != "pixel_values"}
    known = inspect.signature(module.get_rope_index).parameters
    positions, _ = module.get_rope_index(**{name: value for name, value in given.items() if name in known})
    found: np.ndarray = positions[:, 0].cpu().numpy()
    return found
