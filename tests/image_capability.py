"""Families of transformers with images: tiny models whose trees of images are held against their flat training.

Pixels are random tensors in the form that a family's tower takes, so that no processor is needed: the oracle is the
model's own forward of each trajectory alone, with the same tensors. `tests/engine/test_vision.py` does the same with
real pictures and the processors of the families that it names.
"""

import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.vision_models import FAMILIES, IMAGE_TOKEN, png
from treewise import Trajectory, TreeEngine
from treewise.data.images import decoded
from treewise.nn.flops import flop_model
from treewise.nn.model import base_model, split_model
from treewise.nn.vision import tower, vision_model
from treewise.testing.families import tiny_model
from treewise.testing.oracle import gradient_error, gradients_of
from treewise.tree.images import ImageSpan

A, B, C = (png(seed) for seed in (1, 2, 3))
# Text ((seed, number of tokens)) and images: forks before, between and after images, one image at two places.
HISTORIES = (
    [(1, 5), A, (2, 4), B, (3, 3)],
    [(1, 5), A, (2, 4), B, (4, 5)],
    [(1, 5), A, (2, 4), C, (3, 3)],
    [(1, 5), B, (2, 4), (5, 3)],
    [(1, 5), A, (6, 4), A, (7, 2)],
    [(9, 6), (10, 3)],
)
Tensors = dict[str, torch.Tensor]
Layout = Callable[[np.random.Generator], Tensors]  # the tensors of one image
SIDE = 16  # pixels of an image
_PINPOINTS = {"image_grid_pinpoints": [[16, 16], [16, 32]]}
# What a tiny model of a family needs to have images, beyond `vision_models.FAMILIES`.
CHANGES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {4: 2}},
    "cohere_compass": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "gemma4": {"text_config": {"global_head_dim": 8, "use_bidirectional_attention": "vision"}},
    "cosmos3_omni": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 61, "vision_end_token_id": 62, "audio_start_token_id": 63},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 61, "vision_end_token_id": 62, "audio_start_token_id": 63},
    "janus": {"vision_config": {"projection_dim": 32}},
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "vipllava": {"vision_feature_layers": [-1, -2]},
}


class RandomPixels:
    """Stands for an image processor: the tensors of each picture are random, by its content."""

    model_input_names = ("pixel_values",)

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __call__(self, images: list[Any], return_tensors: str = "pt") -> Tensors:
        """The tensors of PIL images, joined."""
        assert return_tensors == "pt"
        seeds = [int.from_bytes(hashlib.sha256(each.tobytes()).digest()[:4], "big") for each in images]
        parts = [self._layout(np.random.default_rng(seed)) for seed in seeds]
        return {name: tower.join([part[name] for part in parts], name, parts[0].keys()) for name in parts[0]}


@contextmanager
def every_family_admitted() -> Iterator[None]:
    """Families that the table refuses are tried inside."""
    kept, tower.refuse_unsupported = tower.refuse_unsupported, lambda _: None
    try:
        yield
    finally:
        tower.refuse_unsupported = kept


def image_model(family: str) -> Any:
    """A tiny random model of a family, with a tower."""
    changes = FAMILIES[family].changes if family in FAMILIES else CHANGES.get(family, {})
    try:
        model = tiny_model(family, sees=True, **{"image_token_id": IMAGE_TOKEN, **changes})
    except Exception as fault:  # whatever transformers raises for a configuration that it cannot build
        raise NotImplementedError(f"no small model of it with a tower can be built: {fault}") from fault
    return model.eval()


def image_error(model: nn.Module) -> float:
    """The largest relative difference, of loss or whole gradient or tower's gradient, between flat training and trees.

    Raises:
        UnsupportedModelError: the engine's.
    """
    processor, num_rows = random_pixels(model)
    items = [trajectory(history, num_rows) for history in HISTORIES]
    flat_loss, flat = _flat(model, processor, items)
    trained = {id(each) for each in vision_model(split_model(model)).parameters}
    tower = {
        name for name, each in model.named_parameters() if id(each) in trained and name in flat and flat[name].any()
    }
    assert tower, "no gradient reaches the tower"
    TreeEngine(model, processor=processor).evaluate(items)  # probes
    errors = []
    for attention, max_tokens in (("reference", None), ("auto", None), ("auto", num_rows + 5)):
        model.zero_grad()
        engine = TreeEngine(model, max_tokens, attention, check=False, processor=processor)
        errors.append(abs(engine.step(items).loss - flat_loss) / flat_loss)
        found = gradients_of(model)
        errors.append(gradient_error(found, flat))
        errors.append(gradient_error(*({name: each[name] for name in tower & each.keys()} for each in (found, flat))))
    return float(np.max(errors))


def cost_ratio(model: nn.Module) -> float:
    """Predicted over counted FLOPs of the tower's forward for one image."""
    processor, num_rows = random_pixels(model)
    vision, costs = vision_model(split_model(model)), flop_model(model).vision
    assert costs is not None
    pixels = processor([decoded(A, "test")])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        vision.encode([pixels], [num_rows], ["a"])
    return float(costs.forward(np.array([num_rows]))[0]) / counter.get_total_flops()


def random_pixels(model: nn.Module) -> tuple[RandomPixels, int]:
    """A processor whose tensors the tower takes, and the feature rows of an image.

    Raises:
        UnsupportedModelError: the model has no tower that is known here.
    """
    vision = vision_model(split_model(model))
    known = inspect.signature(vision.module.get_image_features).parameters
    faults = []
    for layout in _layouts(base_model(model).config, known):
        tensors = layout(np.random.default_rng(0))
        try:
            with torch.no_grad():
                output = vision.module.get_image_features(
                    **{name: value for name, value in tensors.items() if name in known}, return_dict=True
                )
        except Exception as fault:  # of many models
            faults.append(f"{type(fault).__name__}: {' '.join(str(fault).split())[:80]}")
            continue
        rows = output.pooler_output
        if rows is None:
            raise NotImplementedError("its get_image_features gives no pooler_output")
        parts = [rows] if isinstance(rows, torch.Tensor) else list(rows)
        return RandomPixels(layout), sum(each.reshape(-1, each.shape[-1]).shape[0] for each in parts)
    raise NotImplementedError("its tower takes none of the forms of pixels that were tried: " + faults[0])


def _layouts(config: Any, arguments: Mapping[str, inspect.Parameter]) -> Iterator[Layout]:
    """Forms of pixels, by the tower's arguments: those without a default first, then with the others."""
    required = {name for name, each in arguments.items() if each.default is inspect.Parameter.empty}
    for known in dict.fromkeys((frozenset(required), frozenset(arguments))):
        yield from _patches(config, known)
        for side, num_tiles in itertools.product((SIDE, 2 * SIDE), (None, 1, 2)):
            yield partial(_tiles, known, side, num_tiles)


def _tiles(known: frozenset[str], side: int, num_tiles: int | None, rng: np.random.Generator) -> Tensors:
    """A square image, alone or as some tiles, with what else a tower may take of it."""
    tiles = () if num_tiles is None else (num_tiles,)
    tensors = {"pixel_values": _random(rng, 1, *tiles, 3, side, side)}
    more = {
        "image_sizes": torch.tensor([[side, side]]),
        "pixel_attention_mask": torch.ones(1, *tiles, *(() if num_tiles is None else (side, side)), dtype=torch.bool),
        "high_res_pixel_values": _random(rng, 1, 3, side, side),
    }
    return tensors | {name: value for name, value in more.items() if name in known}


def _patches(config: Any, known: frozenset[str]) -> Iterator[Layout]:
    """An image that is cut into patches before the tower."""
    vision = getattr(config, "vision_config", None) or config
    patch, depth, merge = (
        value[0] if isinstance(value, list | tuple) else value
        for value in (
            getattr(vision, "patch_size", None) or 4,
            getattr(vision, "temporal_patch_size", None) or 1,
            getattr(vision, "spatial_merge_size", None)
            or getattr(config, "spatial_merge_size", None)
            or getattr(vision, "merge_kernel_size", None)
            or getattr(vision, "pooling_kernel_size", None)
            or 2,
        )
    )
    side = 2 * merge
    shapes = {
        "image_grid_thw": torch.tensor([[1, side, side]]),
        "spatial_shapes": torch.tensor([[side, side]]),
        "target_sizes": torch.tensor([[8, 8]]),
        "image_merge_sizes": torch.tensor([merge]),
        "image_position_ids": torch.cartesian_prod(torch.arange(side), torch.arange(side))[None],
    }
    found = {name: shapes[name] for name in shapes.keys() & known}
    if "pixel_attention_mask" in known:
        found["pixel_attention_mask"] = torch.ones(1, side**2, dtype=torch.long)
    if not found.keys() & shapes.keys():
        return
    shapes_of_patches = (
        ((side**2, 3 * depth * patch**2), (side**2, 3 * patch**2), (side**2, 3, patch, patch))
        if "image_grid_thw" in found
        else ((1, side**2, 3 * patch**2), (1, side**2, 3 * (patch * merge) ** 2))
    )
    if "target_sizes" in found:
        shapes_of_patches = ((1, 3, patch, 64 * patch),)
    for shape in shapes_of_patches:
        yield partial(_with_patches, found, shape)


def _with_patches(found: Tensors, shape: tuple[int, ...], rng: np.random.Generator) -> Tensors:
    return {"pixel_values": _random(rng, *shape), **found}


def _random(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32))


def trajectory(history: list[Any], num_rows: int) -> Trajectory:
    """A history with images of so many placeholders."""
    ids: list[int] = []
    spans = []
    for part in history:
        if isinstance(part, bytes):
            spans.append(ImageSpan(part, len(ids), len(ids) + num_rows))
            ids += [IMAGE_TOKEN] * num_rows
        else:
            ids += np.random.default_rng(part[0]).integers(3, 50, part[1]).tolist()
    return Trajectory(ids, images=tuple(spans))


def _flat(model: nn.Module, processor: Any, items: list[Trajectory]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the mean over trained tokens, one trajectory after the other."""
    total = sum(float(item.loss_weights.sum()) for item in items)
    known = inspect.signature(type(model).forward).parameters
    model.zero_grad()
    loss = 0.0
    for item in items:
        ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
        seen = {}
        if item.images:
            types = (ids == IMAGE_TOKEN).int()
            seen = processor([decoded(each.read(), "test") for each in item.images])
            seen |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in known}
        logits = model(input_ids=ids, use_cache=False, **seen).logits[0, :-1]
        values = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
        part = -(values * torch.from_numpy(item.loss_weights[1:])).sum() / total
        part.backward()
        loss += part.item()
    return loss, gradients_of(model)
