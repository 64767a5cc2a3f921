"""Images of records: read from files, bytes and addresses, and placed among the tokens of a text."""

from treewise.data.images.placing import Placer, row_images, with_images, with_node_images
from treewise.data.images.reading import ImageReader, decoded

__all__ = ["ImageReader", "Placer", "decoded", "row_images", "with_images", "with_node_images"]
