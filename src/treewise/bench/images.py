"""What images cost on a model that sees: its processor, tokens of an image, and seconds of its tower."""

import io
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from treewise.engine.vision import processed_by
from treewise.nn.device import synchronized_clock
from treewise.nn.gradients import zero_gradients
from treewise.nn.model import split_model
from treewise.nn.vision import vision_model
from treewise.tree.forest import Forest

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
BLOCK = 14  # pixels of one colour in a made screenshot


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """The images of a model of the Qwen-VL families.

    processor: makes its pixel tensors. first_special: text tokens are below. side: pixels of the square that one
    placeholder stands for.
    """

    processor: object
    image_token: int
    first_special: int
    side: int

    def placeholders(self, width: int, height: int) -> np.ndarray:
        """[n] int64, the placeholders of an image whose sides are multiples of `side`."""
        return np.full(width // self.side * (height // self.side), self.image_token, dtype=np.int64)


def image_format(model: PreTrainedModel) -> ImageFormat | None:
    """The format of images of a model of the Qwen-VL families; None of any other."""
    config = model.config
    if config.model_type not in KINDS:
        return None
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    vision = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    processor = Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=side**2,
        max_pixels=2**26,
    )
    special = (getattr(config, f"{name}_token_id", None) for name in ("image", "video", "vision_start", "vision_end"))
    return ImageFormat(processor, config.image_token_id, min(each for each in special if each is not None), side)


def random_png(rng: np.random.Generator, width: int, height: int) -> bytes:
    """A picture of random blocks, as the bytes of a file."""
    from PIL import Image

    small = rng.integers(0, 256, (-(-height // BLOCK), -(-width // BLOCK), 3), dtype=np.uint8)
    pixels = np.kron(small, np.ones((BLOCK, BLOCK, 1), dtype=np.uint8))[:height, :width]
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def tower_seconds(model: PreTrainedModel, forest: Forest, processor: object, repetitions: int) -> list[float]:
    """Seconds of one forward and backward of the tower over the distinct images of a forest, after one to warm up."""
    vision = vision_model(split_model(model))
    sources = forest.images.sources
    pixels = [processed_by(processor, "")(each) for each in sources]
    spans = {each.digest: item.token_ids[each.start : each.end] for item in forest.trajectories for each in item.images}
    num_rows = [int((spans[each.digest] == vision.image_token).sum()) for each in sources]
    seconds = []
    for _ in range(repetitions + 1):
        zero_gradients(model)
        started = synchronized_clock(model.device)
        features = vision.encode(pixels, num_rows, [each.name for each in sources])
        if vision.is_trained:
            torch.autograd.backward(features, [torch.ones_like(each) for each in features])
        seconds.append(synchronized_clock(model.device) - started)
    zero_gradients(model)
    return seconds[1:]
