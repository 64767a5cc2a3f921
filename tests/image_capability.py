"""Families of transformers with images: tiny models whose trees of images are held against their flat training.

Pixels are random tensors in the form that a family's tower takes, so that no processor is needed: the oracle is the
model's own forward of each trajectory alone, with the same tensors. `tests/nn/vision/test_forest_images.py` does the
same with real pictures and the processors of the families that it names.
"""

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.image_models import FAMILIES, IMAGE_TOKEN, png
from treewise import Trajectory, TreeEngine
from treewise.data.images import decoded
from treewise.nn.model import split_model
from treewise.nn.model_flops import flop_model
from treewise.nn.vision import tower, vision_model
from treewise.nn.vision.costs import Form, drawn, pixel_forms
from treewise.nn.vision.tower import feature_rows
from treewise.nn.wrapped import base_model
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
    "kimi_k25": {"projection_hidden_size": 32},
    "granite_docling": {"vision_config": {"patch_size": 4, "scale_factor": 2, "deepstack_visual_indexes": [0]}},
    "llama4": {
        "vision_config": {
            **{"intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
        }
    },
    # With its own factor (3.87) float32 sums of a tiny model differ by 1e-5 from one order to another.
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 32, "text_config": {"qk_scale_factor": 1.0}},
    "shieldgemma2": FAMILIES["gemma3"].changes,
    "janus": {"vision_config": {"projection_dim": 32}},
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "vipllava": {"vision_feature_layers": [-1, -2]},
}


class RandomPixels:
    """Stands for an image processor: the tensors of each picture are random, by its content."""

    model_input_names = ("pixel_values",)

    def __init__(self, form: Form) -> None:
        self._form = form

    def __call__(self, images: list[Any], return_tensors: str = "pt") -> Tensors:
        """The tensors of PIL images, joined."""
        assert return_tensors == "pt"
        seeds = [int.from_bytes(hashlib.sha256(each.tobytes()).digest()[:4], "big") for each in images]
        parts = [drawn(self._form, partial(_random, np.random.default_rng(seed))) for seed in seeds]
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


def cost_ratios(model: nn.Module) -> tuple[float, float]:
    """Predicted over counted FLOPs of tower and projector for one image: forward, and backward.

    Attention is counted as two products, forward, and four backward; of the predicted backward too.
    """
    processor, num_rows = random_pixels(model)
    vision, costs = vision_model(split_model(model)), flop_model(model).vision
    assert costs is not None
    pixels = processor([decoded(A, "test")])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        features = vision.encode([pixels], [num_rows], ["a"])
        forward = counter.get_total_flops()
        torch.autograd.backward(features, [torch.ones_like(each) for each in features])
    rows = np.array([num_rows])
    linear = replace(costs, attention=(0.0, 0.0))
    attention = float((costs.forward(rows) - linear.forward(rows))[0])
    backward = float((linear.step(rows) - linear.forward(rows))[0]) + 2 * attention
    return float(costs.forward(rows)[0]) / forward, backward / (counter.get_total_flops() - forward)


def random_pixels(model: nn.Module) -> tuple[RandomPixels, int]:
    """A processor whose tensors the tower takes, and the feature rows of an image.

    Raises:
        UnsupportedModelError: the model has no tower that is known here.
    """
    vision = vision_model(split_model(model))
    known = inspect.signature(vision.module.get_image_features).parameters
    faults = []
    for form in pixel_forms(base_model(model).config, known, (SIDE, 2 * SIDE), merged_side=2):
        tensors = drawn(form, partial(_random, np.random.default_rng(0)))
        try:
            with torch.no_grad():
                output = vision.module.get_image_features(
                    **{name: value for name, value in tensors.items() if name in known}, return_dict=True
                )
        except Exception as fault:  # of many models
            faults.append(f"{type(fault).__name__}: {' '.join(str(fault).split())[:80]}")
            continue
        rows = feature_rows(output)
        parts = [rows] if isinstance(rows, torch.Tensor) else list(rows)
        return RandomPixels(form), sum(each.reshape(-1, each.shape[-1]).shape[0] for each in parts)
    raise NotImplementedError("its tower takes none of the forms of pixels that were tried: " + faults[0])


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32))


def trajectory(history: list[Any], num_rows: int | dict[bytes, int]) -> Trajectory:
    """A history with images of so many placeholders, all of them or each."""
    ids: list[int] = []
    spans = []
    for part in history:
        if isinstance(part, bytes):
            size = num_rows if isinstance(num_rows, int) else num_rows[part]
            spans.append(ImageSpan(part, len(ids), len(ids) + size))
            ids += [IMAGE_TOKEN] * size
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
