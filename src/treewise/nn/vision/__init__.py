"""Images in a model: one pass of the vision tower for each, and the arguments that put its features on tokens."""

from treewise.nn.vision.tower import (
    IN_WINDOWS,
    Features,
    PixelInputs,
    VisionModel,
    image_token_of,
    pixel_inputs,
    row_arguments,
    tree_positions,
    vision_model,
)

__all__ = [
    "IN_WINDOWS",
    "Features",
    "PixelInputs",
    "VisionModel",
    "image_token_of",
    "pixel_inputs",
    "row_arguments",
    "tree_positions",
    "vision_model",
]
