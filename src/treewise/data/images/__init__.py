"""Images of records: read from files, bytes and addresses, and placed among the tokens of a text."""

from treewise.data.images.placing import ImagePlacer, image_of_part, row_images, with_images, with_node_images
from treewise.data.images.reading import ImageReader, decoded, image_reader

__all__ = [
    "ImageReader",
    "ImagePlacer",
    "decoded",
    "image_of_part",
    "image_reader",
    "row_images",
    "with_images",
    "with_node_images",
]
