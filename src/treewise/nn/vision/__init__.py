"""Images in a model: one pass of the vision tower for each, and the arguments that put its features on tokens."""

from treewise.nn.vision.costs import vision_costs
from treewise.nn.vision.forest_images import (
    EngineImages,
    ForestVision,
    PixelsOf,
    flat_images,
    opened,
    processed_by,
)
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
    "EngineImages",
    "Features",
    "ForestVision",
    "PixelInputs",
    "PixelsOf",
    "VisionModel",
    "flat_images",
    "image_token_of",
    "opened",
    "pixel_inputs",
    "processed_by",
    "row_arguments",
    "tree_positions",
    "vision_costs",
    "vision_model",
]
