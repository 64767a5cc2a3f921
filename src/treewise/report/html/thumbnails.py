"""Small copies of the images on a page, as data addresses in the page itself; together they are bounded."""

import base64
import io
from dataclasses import dataclass, field

from treewise.data.images import decoded
from treewise.errors import ConfigError, DataError
from treewise.tree.images import ImageSpan

MAX_WIDTH, MAX_HEIGHT = 240, 160  # pixels
MAX_CHARS = 4_000_000  # of all thumbnails of a page
ABSENT = -1


@dataclass(slots=True)
class Thumbnails:
    """The thumbnails of a page, in order of appearance, each distinct image once."""

    addresses: list[str] = field(default_factory=list)
    num_chars: int = 0
    _index: dict[str, int] = field(default_factory=dict)

    def index(self, image: ImageSpan) -> int:
        """The page's index of an image; `ABSENT` where it cannot be read any more, or the page has no room for it."""
        if image.digest not in self._index:
            self._index[image.digest] = self._add(image)
        return self._index[image.digest]

    def _add(self, image: ImageSpan) -> int:
        try:
            address = thumbnail(image)
        except (DataError, ConfigError):  # the page tells that it is absent
            return ABSENT
        if self.num_chars + len(address) > MAX_CHARS:
            return ABSENT
        self.num_chars += len(address)
        self.addresses.append(address)
        return len(self.addresses) - 1


def thumbnail(image: ImageSpan) -> str:
    """An image as the data address of a JPEG within `MAX_WIDTH` and `MAX_HEIGHT`.

    Raises:
        DataError: the image cannot be read.
        ConfigError: Pillow is not installed.
    """
    small = decoded(image.read(), image.name)
    small.thumbnail((MAX_WIDTH, MAX_HEIGHT))
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=70)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
