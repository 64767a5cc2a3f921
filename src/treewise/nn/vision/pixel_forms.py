"""Forms of the tensors that a tower takes for one image, by the names of its arguments and its configuration.

Image processors make these tensors; here they are made without one, to count what a tower computes (`tower_flops`) and
to try families with random pixels. Several forms are given where the arguments leave a choice; the tower refuses
all but its own.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import Parameter
from typing import Any

import torch

from treewise.nn.vision.pixels import PixelInputs

Draw = Callable[..., torch.Tensor]  # pixels of a shape
Form = Callable[[Draw], PixelInputs]  # the tensors of one image


def pixel_forms(
    config: Any, arguments: Mapping[str, Parameter], sides: Sequence[int], merged_side: int
) -> Iterator[Form]:
    """Forms of one square image: those of the arguments without a default first, then with the others.

    arguments: of the model's `get_image_features`. sides: in pixels, for towers that take whole images. merged_side:
    in feature rows, for towers that take patches.
    """
    required = {name for name, each in arguments.items() if each.default is Parameter.empty}
    for known in dict.fromkeys((frozenset(required), frozenset(arguments))):
        yield from _patches(config, known, merged_side)
        for side, num_tiles in itertools.product(sides, (None, 1, 2)):
            yield partial(_tiles, known, side, num_tiles)
            if num_tiles and "pixel_attention_mask" in known:
                yield partial(_masked_tiles, side, num_tiles)
    yield partial(_with_patches, {}, (1, merged_side**2, 3 * patch_sizes(config)[0] ** 2))


def patch_sizes(config: Any) -> tuple[int, int, int]:
    """Pixels of a patch's side, frames of a patch, and patches of a feature row's side."""
    vision = getattr(config, "vision_config", None) or config
    merges = ("spatial_merge_size", "merge_kernel_size", "pooling_kernel_size", "merge_size")
    merge = next(
        (value for where, name in itertools.product((vision, config), merges) if (value := getattr(where, name, None))),
        2,
    )
    patch = getattr(vision, "patch_size", None) or 4
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    return _first(patch), _first(frames), _first(merge)


def _tiles(known: frozenset[str], side: int, num_tiles: int | None, draw: Draw) -> PixelInputs:
    """A square image, alone or as some tiles, with what else a tower may take of it."""
    tiles = () if num_tiles is None else (num_tiles,)
    more = {
        "image_sizes": lambda: torch.tensor([[side, side]]),
        "pixel_attention_mask": lambda: torch.ones(1, *tiles, *(side, side) * len(tiles), dtype=torch.bool),
        "high_res_pixel_values": lambda: draw(1, 3, side, side),
    }
    return {"pixel_values": draw(1, *tiles, 3, side, side)} | {
        name: make() for name, make in more.items() if name in known
    }


def _masked_tiles(side: int, num_tiles: int, draw: Draw) -> PixelInputs:
    """Tiles of which those of the mask count."""
    mask = torch.ones(1, num_tiles, dtype=torch.bool)
    return {"pixel_values": draw(1, num_tiles, 3, side, side), "pixel_attention_mask": mask}


def _patches(config: Any, known: frozenset[str], merged_side: int) -> Iterator[Form]:
    """An image that is cut into patches before the tower."""
    patch, frames, merge = patch_sizes(config)
    side, target = merge * merged_side, 4 * merged_side
    shapes = {
        "image_grid_thw": torch.tensor([[1, side, side]]),
        "spatial_shapes": torch.tensor([[side, side]]),
        "target_sizes": torch.tensor([[target, target]]),
        "image_merge_sizes": torch.tensor([merge]),
        "image_position_ids": torch.cartesian_prod(torch.arange(side), torch.arange(side))[None],
    }
    found = {name: shapes[name] for name in shapes.keys() & known}
    if "pixel_attention_mask" in known:
        found["pixel_attention_mask"] = torch.ones(1, side**2, dtype=torch.long)
    if not found.keys() & shapes.keys():
        return
    of_patches: tuple[tuple[int, ...], ...] = (
        ((side**2, 3 * frames * patch**2), (side**2, 3 * patch**2), (side**2, 3, patch, patch))
        if "image_grid_thw" in found
        else ((1, side**2, 3 * patch**2), (1, side**2, 3 * (patch * merge) ** 2))
    )
    if "target_sizes" in found:
        of_patches = ((1, 3, patch, target**2 * patch),)
    for shape in of_patches:
        yield partial(_with_patches, found, shape)


def _with_patches(found: PixelInputs, shape: tuple[int, ...], draw: Draw) -> PixelInputs:
    return {"pixel_values": draw(*shape), **found}


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)
