"""Images of chat messages: found in every form that people have, written by the template, placed by the processor.

Inside of treewise a message's content is text, `message["images"]` lists its images in order and
`message["image_places"]` where in the text each stands; the template gets content parts. It writes one placeholder for
each, which is replaced by the tokens that the processor makes of that image: what the processor does with text and
images, per message instead of per conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treewise.data.images.reading import NEEDS_PROCESSOR, ImageReader
from treewise.data.io.field_checks import shown
from treewise.data.io.files import Placed
from treewise.data.render.messages import IMAGES, PLACES, Message, WeightedMessages
from treewise.data.render.piece_tokenizer import Pieces
from treewise.errors import DataError, num
from treewise.tree import checks
from treewise.tree.images import ImageSpan

COLUMN = object()  # an image part without a value, which is the next of the record's column


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image that was decoded once: the path of its file, its digest, its height and width."""

    source: str
    digest: str
    size: tuple[int, int]


def image_of_part(part: Message) -> object:
    """The image of a content part, as a path, bytes, an address or PIL; `COLUMN` where it names none."""
    for name in ("image", "image_url", "url", "path", "bytes", "source", "base64"):
        value = part.get(name)
        if isinstance(value, dict):  # {"url": ...} of OpenAI, {"data": ...} of Anthropic, {"bytes": ..., "path": ...}
            data = value.get("data")
            value = value.get("url") or (f"data:;base64,{data}" if data else value)
        if value is not None:
            return f"data:;base64,{value}" if name == "base64" else value
    return COLUMN


def with_column(messages: Sequence[Message], column: object, location: str) -> list[Message]:
    """The messages with the images of the record's `images` (None: it has none) at the parts that name none.

    Where no message has an image part, the images stand before the text of the first user message, as TRL puts them.

    Raises:
        DataError: another number of images than parts.
    """
    if column is None:
        column = []
    if not isinstance(column, list):
        raise DataError(f"{location}: images must be a list, one entry for each image, found {shown(column)}.")
    result = [dict(message) for message in messages]
    waiting = [
        (message, index) for message in result for index, image in enumerate(message.get(IMAGES, ())) if image is COLUMN
    ]
    first = next((message for message in result if message["role"] == "user"), None)
    if column and not any(message.get(IMAGES) for message in result) and first is not None:
        first |= {IMAGES: list(column), PLACES: [0] * len(column)}
        return result
    if len(waiting) != len(column):
        raise DataError(
            f"{location}: {num(len(column), 'image')} in images for {num(len(waiting), 'image part')} without an image "
            "of its own in the messages."
        )
    for (message, index), image in zip(waiting, column, strict=True):
        message[IMAGES] = [*message[IMAGES][:index], image, *message[IMAGES][index + 1 :]]
    return result


def with_images(talk: WeightedMessages, item: Placed, reader: ImageReader | None) -> WeightedMessages:
    """A conversation with the images of its record read and decoded once. reader: None without the model's processor.

    Raises:
        DataError: an image that cannot be read, or no reader for it; another number of images than parts.
    """
    messages = with_column(talk.messages, item.value.get("images"), item.location)
    read = [
        _with_images_read(message, reader, item.file, f"{item.location}: messages[{turn}]")
        for turn, message in enumerate(messages)
    ]
    return WeightedMessages(read, talk.weights)


def with_node_images(message: Message, node: Placed, reader: ImageReader | None, location: str) -> Message:
    """The message of a node of a declared tree, with its images read. Raises the same."""
    [message] = with_column([message], node.value.get("images"), location)
    return _with_images_read(message, reader, node.file, location)


def row_images(item: Placed, token_ids: object, reader: ImageReader | None) -> tuple[ImageSpan, ...]:
    """The images of a row or a node of token ids, at their placeholders.

    Raises:
        DataError: no reader, an image that cannot be read, or another number of placeholders.
    """
    if reader is None:
        raise DataError(f"{item.location}: the record {NEEDS_PROCESSOR}")
    ids = checks.checked_ids(token_ids, item.location)
    return tuple(reader.spans(item.value["images"], ids, item.file, item.location))


def _with_images_read(message: Message, reader: ImageReader | None, data_file: Path | None, location: str) -> Message:
    if not message.get(IMAGES):
        return message
    if reader is None:
        raise DataError(f"{location}: the record {NEEDS_PROCESSOR}")
    read = []
    for index, image in enumerate(message[IMAGES]):
        source, digest = reader.source(image, data_file, f"{location}, image {index}")
        read.append(ReadImage(source, digest, reader.size_of[digest]))
    return {**message, IMAGES: read}


class ImagePlacer:
    """Puts the tokens of images into tokenised texts. Equal pieces with equal images stay the same array."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader
        # The piece itself is kept beside, so that no other array can have its `id`.
        self._placed: dict[tuple[int, tuple[str, ...]], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def written(self, text: str) -> str:
        """A rendered text with what the processor writes around images, one placeholder token for each."""
        around = self._reader.text_around
        return text if around is None else text.replace(*around)

    def place(self, pieces: Pieces, messages: Sequence[Message], location: str) -> tuple[Pieces, tuple[ImageSpan, ...]]:
        """The pieces with every placeholder replaced by the tokens of its image, and where these are.

        messages: what the text was rendered from.

        Raises:
            DataError: the template wrote another number of placeholders than the messages have images.
        """
        images: list[ReadImage] = [image for message in messages for image in message.get(IMAGES, ())]
        counts = [int((piece == self._reader.token).sum()) for piece in pieces]
        if sum(counts) != len(images):
            raise DataError(
                f"{location}: the text holds {num(sum(counts), 'image token')} for {num(len(images), 'image')}: "
                "does the chat template write images, and does no message hold the text of an image token?"
            )
        result, spans = list(pieces), []
        start = used = 0
        for index, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
            if count:
                own = images[used : used + count]
                result[index], bounds = self._expanded(piece, own, location)
                spans += [
                    ImageSpan(image.source, start + int(low), start + int(high), image.digest)
                    for image, (low, high) in zip(own, bounds, strict=True)
                ]
                used += count
            start += len(result[index])
        return tuple(result), tuple(spans)

    def _expanded(self, piece: np.ndarray, images: Sequence[ReadImage], location: str) -> tuple[np.ndarray, np.ndarray]:
        """A piece with its placeholders replaced, and [images, 2] int64, the span of each."""
        key = (id(piece), tuple(image.digest for image in images))
        if key not in self._placed:
            token, parts, bounds, length = self._reader.token, [], [], 0
            positions = np.flatnonzero(piece == token)
            for low, high, image in zip([0, *(positions[:-1] + 1)], positions, images, strict=True):
                tokens = self._reader.expansion(image.size, location)
                within = np.flatnonzero(tokens == token)
                parts += [piece[low:high], tokens]
                length += high - low
                bounds.append((length + within[0], length + within[-1] + 1))
                length += len(tokens)
            parts.append(piece[positions[-1] + 1 :])
            self._placed[key] = np.concatenate(parts), np.array(bounds), piece
        return self._placed[key][:2]
