"""Images in a model: one pass of the vision tower for each, and the arguments that put its features on tokens."""

from treewise.nn.vision.pixels import PixelInputs, image_token_of, pixel_inputs, row_arguments
from treewise.nn.vision.positions import has_own_positions, tree_positions
from treewise.nn.vision.tower import IN_WINDOWS, Features, VisionModel, vision_model

__all__ = [
    "IN_WINDOWS",
    "Features",
    "PixelInputs",
    "VisionModel",
    "has_own_positions",
    "image_token_of",
    "pixel_inputs",
    "row_arguments",
    "tree_positions",
    "vision_model",
]
