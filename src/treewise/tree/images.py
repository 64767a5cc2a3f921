"""Images of trajectories: which tokens stand for which image, and where these are on a forest.

A model reads an image in place of a run of placeholder tokens, which are all alike. So a placeholder is the same token
in two trajectories only where the image is: prefixes are merged by token, image and offset within the image.

Letters: I images on a forest (one that two branches see is two), F flat tokens, N trajectories.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treewise.errors import DataError


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """One image of a trajectory and the tokens that stand for it.

    Parameters:
        source: the path of an image file, or its bytes (PNG, JPEG, ...); read when it is needed.
        start: the first placeholder token of the image.
        end: one past the last one. Other tokens may lie between (a model's row breaks), none of another image.
        digest: SHA-256 of the file's bytes, as hexadecimal text; computed where it is not given.

    Raises:
        DataError: a file that cannot be read, or an empty span.
    """

    source: str | bytes | Path
    start: int
    end: int
    digest: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.source, Path):
            object.__setattr__(self, "source", str(self.source))
        if not 0 <= self.start < self.end:
            raise DataError(f"{self.name}: tokens {self.start} to {self.end} are not a span; give start < end.")
        if not self.digest:
            object.__setattr__(self, "digest", hashlib.sha256(self.read()).hexdigest())

    @property
    def name(self) -> str:
        """What errors and reports call the image: its source, or its size."""
        return f"an image of {len(self.source):,} bytes" if isinstance(self.source, bytes) else str(self.source)

    def read(self) -> bytes:
        """The bytes of the image file.

        Raises:
            DataError: it cannot be read, or has changed since its digest was computed.
        """
        if isinstance(self.source, bytes):
            return self.source
        try:
            data = Path(self.source).read_bytes()
        except (OSError, ValueError) as error:
            raise DataError(f"{self.source}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
        if self.digest and hashlib.sha256(data).hexdigest() != self.digest:
            raise DataError(f"{self.source}: the image changed since the data was loaded; load the data again.")
        return data


def check_spans(images: object, length: int, location: str) -> tuple[ImageSpan, ...]:
    """The images of a trajectory of `length` tokens, in order.

    Raises:
        DataError: something else, a span outside the trajectory, or spans that overlap or are not in order.
    """
    items = tuple(images) if isinstance(images, list | tuple) else (images,)
    end = 0
    for item in items:
        if not isinstance(item, ImageSpan):
            raise DataError(
                f"{location}: images must be a list of tw.ImageSpan, found {type(item).__name__}; load_trees makes "
                "them from paths and bytes, by the model's processor."
            )
        if item.start < end or item.end > length:
            raise DataError(
                f"{location}: {item.name} at tokens {item.start} to {item.end} overlaps the image before it, which "
                f"ends at {end}, or exceeds the trajectory's {length} tokens."
            )
        end = item.end
    return items


def merge_keys(images: Sequence[Sequence[ImageSpan]], flat_ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """[F] int32, equal where tokens and what they stand for are equal.

    images: of each trajectory. flat_ids: [F] int32 tokens of all of them. offsets: [N + 1] where each begins.

    An image's span has keys of its own, by image, tokens and offset, so no fork is inside of it.
    """
    unique, keys = np.unique(flat_ids, return_inverse=True)
    keys = keys.astype(np.int32)
    next_key = len(unique)
    first_key: dict[tuple[str, bytes], int] = {}
    for spans, offset in zip(images, offsets.tolist(), strict=False):
        for image in spans:
            tokens = slice(offset + image.start, offset + image.end)
            length = image.end - image.start
            first = first_key.setdefault((image.digest, flat_ids[tokens].tobytes()), next_key)
            next_key += length if first == next_key else 0
            keys[tokens] = np.arange(first, first + length)
    return keys


@dataclass(frozen=True, slots=True)
class ForestImages:
    """The images on a forest.

    start, end: [I] int64, tree positions `[start, end)` of each, ascending. index: [I] int64, which of `sources` it is.
    sources: the distinct images, each once however often it is seen.
    """

    start: np.ndarray
    end: np.ndarray
    index: np.ndarray
    sources: tuple[ImageSpan, ...]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def largest(self) -> int:
        """Tokens of the largest image, which no budget may be below; 0 without images."""
        return int((self.end - self.start).max()) if len(self) else 0

    @property
    def is_first_place(self) -> np.ndarray:
        """[I] bool, whether it is the first place of its image."""
        is_first = np.zeros(len(self), dtype=bool)
        is_first[np.unique(self.index, return_index=True)[1]] = True
        return is_first

    def covers(self, num_tokens: int) -> np.ndarray:
        """[num_tokens] bool, whether a tree token is inside the span of an image."""
        change = np.zeros(num_tokens + 1, dtype=np.int8)
        change[self.start] += 1
        change[self.end] -= 1  # spans may touch; both changes count
        covered: np.ndarray = np.cumsum(change[:-1], dtype=np.int8) > 0
        return covered


NO_IMAGES = ForestImages(*(np.zeros(0, dtype=np.int64),) * 3, ())


def images_on_paths(images: Sequence[Sequence[ImageSpan]], paths: Sequence[np.ndarray]) -> ForestImages:
    """Where the images of trajectories are on their forest. paths: the tree positions of each, in order."""
    spans: dict[int, ImageSpan] = {}
    for own, path in zip(images, paths, strict=True):
        spans.update((int(path[image.start]), image) for image in own)
    number: dict[tuple[str, int], int] = {}
    starts, index = sorted(spans), []
    sources: list[ImageSpan] = []
    for start in starts:
        image = spans[start]
        # Of two sizes if a processor was set differently; they are other images to the model.
        key = (image.digest, image.end - image.start)
        if key not in number:
            number[key] = len(sources)
            sources.append(image)
        index.append(number[key])
    start_I = np.array(starts, dtype=np.int64)
    length_I = np.array([spans[start].end - spans[start].start for start in starts], dtype=np.int64)
    return ForestImages(start_I, start_I + length_I, np.array(index, dtype=np.int64), tuple(sources))
