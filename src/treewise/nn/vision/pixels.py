"""From an image to the tensors that a model's own image processor makes of it."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treewise.errors import ConfigError
from treewise.shapes import Int

PixelInputs = dict[str, torch.Tensor]
_TOKEN_NAMES = ("image_token_id", "image_token_index")


def pixel_inputs(processor: Any, images: Sequence[Any]) -> PixelInputs:
    """The tensors of some images (PIL), by the names of the model's arguments.

    processor: the model's processor, or its image processor.

    Raises:
        ConfigError: a processor that takes no images.
    """
    process = getattr(processor, "image_processor", processor)
    if process is None or not callable(process) or not hasattr(process, "model_input_names"):
        raise ConfigError(
            f"processor is a {type(processor).__name__}, which takes no images; give the model's processor "
            "(transformers.AutoProcessor.from_pretrained)."
        )
    made = process(images=list(images), return_tensors="pt")
    return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}


def row_arguments(
    model: Any, processor: Any, images: Sequence[Any], token_ids: Int[Tensor, " n"]
) -> dict[str, torch.Tensor]:
    """What a flat row gives to the model's own forward beside its token ids.

    images: of the row, in order (PIL). token_ids: [n] int64.
    """
    known = inspect.signature(type(model).forward).parameters
    made = {name: value.to(token_ids.device) for name, value in pixel_inputs(processor, images).items()}
    types = torch.eq(token_ids, image_token_of(model.config) or -1).long()[None]
    made |= {"mm_token_type_ids": types, "token_type_ids": types}
    return {name: value for name, value in made.items() if name in known}


def image_token_of(config: Any) -> int | None:
    """The token that stands for a part of an image; None for a model of text."""
    values = (getattr(config, name, None) for name in _TOKEN_NAMES)
    return next((value for value in values if isinstance(value, int)), None)


def feature_rows(output: Any) -> Any:
    """What a model's own forward takes of the output of `get_image_features`: Fuyu's and Llama 4's read it unpooled."""
    rows = getattr(output, "pooler_output", None)
    return output.last_hidden_state if rows is None else rows
