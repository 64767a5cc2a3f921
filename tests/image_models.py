"""Tiny models that see, their processors, and small images, for tests of images."""

import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor

from tests.needs import IMAGES, RELEASE, require
from treewise.data.images import decoded
from treewise.nn.model import split_model
from treewise.nn.vision import pixel_inputs, vision_model
from treewise.nn.wrapped import base_model
from treewise.testing.families import tiny_model
from treewise.tree.trajectory import Trajectory

IMAGE_TOKEN = 60  # of 64
WORDS = 40  # plain ones; what follows is special
_INPUTS = ("pixel_values", "image_sizes", "image_grid_thw")
CLOSED = {"height": 16, "width": 16}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}


@dataclass(frozen=True)
class Family:
    """What a tiny model of a family needs beyond `tiny_model`, its image processor, and the names of special tokens."""

    images: Callable[[], Any]
    changes: dict[str, Any] = field(default_factory=dict)
    processor: Callable[[Any, Any], Any] | None = None
    image_token: str = "<image>"
    special: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def _on_pil(folder: str, name: str, **settings: Any) -> Any:
    """An image processor that needs no torchvision."""
    if Version("5.4") <= RELEASE:
        return getattr(
            importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}"), f"{name}Pil"
        )(**settings)
    return getattr(importlib.import_module(f"transformers.models.{folder}.image_processing_{folder}"), name)(**settings)


FAMILIES = {
    "llava": Family(
        lambda: _on_pil("clip", "CLIPImageProcessor", size={"shortest_edge": 16}, crop_size=CLOSED),
        {},
        lambda images, tokenizer: LlavaProcessor(
            images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
        ),
    ),
    "idefics3": Family(
        lambda: _on_pil(
            "idefics3", "Idefics3ImageProcessor", size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
        ),
        {"scale_factor": 2},
        lambda images, tokenizer: Idefics3Processor(images, tokenizer, image_seq_len=1),
        special=("<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>"),
    ),
    "smolvlm": Family(
        lambda: _on_pil(
            "smolvlm", "SmolVLMImageProcessor", size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
        ),
        {"scale_factor": 2},
    ),
    "internvl": Family(
        lambda: _on_pil(
            "got_ocr2", "GotOcr2ImageProcessor", size=CLOSED, crop_to_patches=True, min_patches=1, max_patches=4
        ),
        {"vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}},
        lambda images, tokenizer: InternVLProcessor(images, tokenizer, None, image_seq_length=4),
        "<IMG_CONTEXT>",
        ("<img>", "</img>"),
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
    ),
    "gemma3": Family(  # images of more tokens than its sliding window
        lambda: _on_pil("gemma3", "Gemma3ImageProcessor", size=CLOSED),
        {"mm_tokens_per_image": 16, "vision_config": {"image_size": 16, "patch_size": 4}},
        lambda images, tokenizer: Gemma3Processor(images, tokenizer, image_seq_length=16),
        "<image_soft_token>",
        ("<start_of_image>", "<end_of_image>"),
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        ("\n", "\n\n", "\n\n\n"),
    ),
    "mistral3": Family(
        lambda: _on_pil("pixtral", "PixtralImageProcessor", size={"longest_edge": 32}, patch_size=16),
        {"image_token_index": IMAGE_TOKEN, "spatial_merge_size": 2, "vision_config": {"head_dim": 8}},
    ),
}
FAMILIES |= {
    name: Family(
        lambda: _on_pil(
            "qwen2_vl", "Qwen2VLImageProcessor", patch_size=8, merge_size=2, min_pixels=1024, max_pixels=2048
        ),
        {"vision_config": {"depth": 3, **vision}, "text_config": text},
        image_token="<|image_pad|>",
    )
    for name, vision, text in (
        ("qwen2_vl", {"embed_dim": 32, "hidden_size": 32, "spatial_merge_size": 2}, {}),
        ("qwen2_5_vl", {"window_size": 32, "fullatt_block_indexes": [1], "spatial_merge_size": 2}, {}),
        (
            "qwen3_vl",
            {"deepstack_visual_indexes": [0, 1], "spatial_merge_size": 2, "num_position_embeddings": 16},
            MROPE,
        ),
    )
}


def seeing_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny random model of a family, with a tower that is small, too; skips the test where none takes features."""
    require(IMAGES)
    return tiny_model(family, dtype, image_token_id=IMAGE_TOKEN, **FAMILIES[family].changes).eval()


def tiny_processor(family: str) -> object:
    """The processor of `seeing_model`, with a tokenizer of 40 words `w0` to `w39`."""
    own = FAMILIES[family]
    assert own.processor is not None
    return own.processor(own.images(), _tokenizer(own))


def png(seed: int, width: int = 20, height: int = 16, kind: str = "PNG") -> bytes:
    """A picture of random pixels, as the bytes of a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def num_rows(model: Any, images: Any, data: bytes) -> int:
    """Placeholder tokens of a picture, as the model's own tower gives them. images: the image processor."""
    vision = vision_model(split_model(model))
    pixels = pixel_inputs(images, [decoded(data, "picture")])
    known = {name: value for name, value in pixels.items() if name in _INPUTS}
    if known["pixel_values"].is_floating_point():
        known["pixel_values"] = known["pixel_values"].to(model.dtype)
    with torch.no_grad():
        rows = vision.module.get_image_features(**known, return_dict=True).pooler_output
    parts = [rows] if isinstance(rows, torch.Tensor) else rows
    return sum(each.reshape(-1, each.shape[-1]).shape[0] for each in parts)


def row_inputs(model: torch.nn.Module, images: Any, item: Trajectory) -> dict[str, torch.Tensor]:
    """What a model's own forward takes beside the token ids of one trajectory, for its images."""
    if not item.images:
        return {}
    seen = images(images=[decoded(each.read(), "picture") for each in item.images], return_tensors="pt")
    inputs = {name: value for name, value in seen.items() if name in _INPUTS}
    is_image = torch.from_numpy(item.token_ids == IMAGE_TOKEN)[None].int()
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = is_image
    config: Any = base_model(model).config
    if config.model_type == "gemma3":
        inputs["token_type_ids"] = is_image
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    return inputs


def _tokenizer(own: Family) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(WORDS)), *own.words]
    special = [*own.special, *(f"<unused{index}>" for index in range(IMAGE_TOKEN - len(words) - len(own.special)))]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    split = pre_tokenizers.Split(Regex(r"\n+|\w+|[^\w\s]+"), "removed", invert=True)
    raw.pre_tokenizer = split if own.words else pre_tokenizers.Whitespace()
    raw.add_special_tokens([AddedToken(name, special=True) for name in [*special, own.image_token]])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=own.names or None,
    )
