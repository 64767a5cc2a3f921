"""Images of records: read from files, bytes or the network, checked, decoded, and counted in tokens, before training.

Pillow decodes them (`pip install 'pillow>=10'`). Files lie below the folder of the data's file, and network addresses
are read (`downloads`), where the data's options do not say otherwise: data may come from others.
"""

import atexit
import base64
import hashlib
import io
import logging
import os
import shutil
import stat
import tempfile
import warnings
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.base.durable import moved_into_place
from treewise.base.paths import path_of
from treewise.data.images.downloads import downloaded
from treewise.data.io.field_checks import printable, shown
from treewise.data.io.options import RenderOptions
from treewise.errors import ConfigError, DataError, num, pip_install
from treewise.tree.images import ImageSpan

if TYPE_CHECKING:
    from transformers import ProcessorMixin

logger = logging.getLogger("treewise")

MAX_PIXELS = 100_000_000  # of one image; more is a decompression bomb or a mistake
NEEDS_PROCESSOR = (
    "holds images, which need the model's processor: give its folder as --tokenizer, or load_trees(..., processor)."
)
NETWORK = ("http:", "https:", "ftp:")  # how an address of another machine begins
NEVER = ("/proc", "/sys", "/dev")  # of the system, not of data
SHARED_MEMORY = "/dev/shm"  # where data may lie
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def decoded(data: bytes, location: str) -> Any:
    """The image as PIL reads it, upright and in RGB, as transformers' `load_image` gives it to processors.

    Raises:
        DataError: bytes that are not an image; an image that is cut off or animated, of another type, or too large.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise ConfigError(f"images need Pillow: {pip_install('pillow')}.") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # too many pixels are counted here, exactly
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(
                    f"{location}: {width} x {height} pixels are more than {MAX_PIXELS:,}; shrink the image."
                )
            if (num_frames := getattr(image, "n_frames", 1)) > 1:
                raise DataError(f"{location}: an animation of {num_frames} frames; videos are not supported.")
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except DataError:  # a ValueError, too
        raise
    except UnidentifiedImageError:
        kinds = ", ".join(FORMATS)
        raise DataError(f"{location}: {len(data):,} bytes that are not an image of a known type ({kinds}).") from None
    except Image.DecompressionBombError:
        raise DataError(f"{location}: more than {MAX_PIXELS:,} pixels; shrink the image.") from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(f"{location}: the image cannot be decoded ({error}); is the file complete?") from None


def image_reader(processor: "ProcessorMixin", options: RenderOptions, cache: Path, *, keeps: bool) -> "ImageReader":
    """The reader of a load. cache: below it, images that come as bytes are kept; where not `keeps`, until the process
    ends, and elsewhere.
    """
    folder = cache / "images"
    if not keeps:
        folder = Path(tempfile.mkdtemp(prefix="treewise-images-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return ImageReader(
        processor,
        folder,
        options.max_image_bytes,
        from_network=options.images_from_network,
        from_local_network=options.images_from_local_network,
        image_folder=options.image_folder,
    )


class ImageReader:
    """Reads the images of records and finds the tokens that stand for them.

    Parameters:
        processor: the model's processor (`transformers.AutoProcessor`).
        folder: where images that come as bytes are kept, by their digest, so that none stays in memory.
        max_bytes: of one image, wherever it comes from.
        from_network: whether http and https addresses are downloaded, each once, and kept like bytes.
        from_local_network: also those of this machine and its network.
        image_folder: where images may lie besides the folder of the data's file.
    """

    def __init__(
        self,
        processor: "ProcessorMixin",
        folder: Path,
        max_bytes: int,
        *,
        from_network: bool = False,
        from_local_network: bool = False,
        image_folder: str | None = None,
    ) -> None:
        self.processor, self.folder, self.max_bytes, self.from_network = processor, folder, max_bytes, from_network
        self.from_local_network, self.image_folder = from_local_network, image_folder
        self._downloads: dict[str, tuple[str, str]] = {}  # by address: what `source` returns
        self.size_of: dict[str, tuple[int, int]] = {}  # by digest: height and width of what `source` read
        self._expansion_of: dict[tuple[int, int], np.ndarray] = {}

    @cached_property
    def text_around(self) -> tuple[str, str] | None:
        """What a text writes for an image, and what the processor writes in its place around one placeholder token.

        None where the placeholder itself is written and only special tokens come around it. Gemma 3 puts line breaks
        there, which tokenizers join with those of the text, so they have to be in it before it becomes tokens.

        Raises:
            ConfigError: a processor that cuts images into crops, each with a text of its own.
        """
        whole = getattr(self.processor, "full_image_sequence", None)
        if not isinstance(whole, str):
            return None
        if getattr(self.processor.image_processor, "do_pan_and_scan", False):
            raise ConfigError(f"{type(self.processor).__name__}: do_pan_and_scan is not supported; set it to False.")
        token = self.processor.tokenizer.image_token
        return self.processor.image_token, whole.replace(token * whole.count(token), token)

    @cached_property
    def token(self) -> int:
        """The placeholder token.

        Raises:
            ConfigError: a processor that names none.
        """
        named = self.processor if self.text_around is None else self.processor.tokenizer
        token = getattr(named, "image_token_id", None)
        if token is None and isinstance(name := getattr(self.processor, "image_token", None), str):
            token = self.processor.tokenizer.convert_tokens_to_ids(name)
        if not isinstance(token, int):
            raise ConfigError(
                f"{type(self.processor).__name__} defines no image token, so its images cannot be placed."
            )
        return token

    def spans(self, images: object, token_ids: np.ndarray, data_file: Path | None, location: str) -> list[ImageSpan]:
        """The images of a row of tokens, each with the placeholders that the processor makes of it, in order.

        images: a list of paths (relative to the record's file), bytes, data addresses, or {path or bytes: ...} of each.
        token_ids: [n] integers.

        Raises:
            DataError: an image that cannot be read, or another number of placeholders than the images have.
        """
        if not isinstance(images, list):
            raise DataError(f"{location}: images must be a list, one entry for each image, found {shown(images)}.")
        positions = np.flatnonzero(token_ids == self.token)
        spans, used = [], 0
        for index, image in enumerate(images):
            where, left = f"{location}: images[{index}]", positions[used:]
            source, digest = self.source(image, data_file, where)
            count = int((self.expansion(self.size_of[digest], where) == self.token).sum())
            if count > len(left):
                raise DataError(
                    f"{where}: the image has {count} tokens, but {len(left)} image tokens ({self.token}) are left in "
                    "the row; one is missing, or the ids were made with another processor."
                )
            spans.append(ImageSpan(source, int(left[0]), int(left[count - 1]) + 1, digest))
            used += count
        if used != len(positions):
            raise DataError(
                f"{location}: {len(positions)} image tokens ({self.token}) for {num(len(images), 'image')} of {used} "
                "together; were the ids made with another processor?"
            )
        return spans

    def source(self, image: object, data_file: Path | None, location: str) -> tuple[str, str]:
        """The path of an image's file and its digest; the image was decoded once, so it is sound.

        Raises:
            DataError: an image that cannot be read.
        """
        value = _value_of(image, location)
        if isinstance(value, str) and value.startswith(NETWORK):
            if not self.from_network and not self.from_local_network:
                raise DataError(
                    f"{location}: {shown(value)} is a network address, which is not read; download the image, or set "
                    "images_from_network."
                )
            if value not in self._downloads:
                data = downloaded(value, location, self.max_bytes, allows_local=self.from_local_network)
                self._downloads[value] = self.source(data, None, f"{location}: {value}")
            return self._downloads[value]
        if isinstance(value, str):
            path = path_of(value)
            path = path if path.is_absolute() or data_file is None else data_file.parent / path
            path = self._confined(path, data_file, location)
            data = _file_bytes(path, location, self.max_bytes)
        else:
            data, path = value, None
            if len(data) > self.max_bytes:
                raise DataError(f"{location}: {_too_large(len(data), self.max_bytes)}")
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self.size_of:
            decoded_image = decoded(data, location if path is None else f"{location}: {path}")
            self.size_of[digest] = decoded_image.height, decoded_image.width
        return str(self._kept(data, digest, location) if path is None else path), digest

    def _confined(self, path: Path, data_file: Path | None, location: str) -> Path:
        """Where a path leads, all links followed.

        data_file: below whose folder it must lie; None: records of the caller's own, which lead anywhere but `NEVER`.

        Raises:
            DataError: it leads elsewhere, or cannot be followed.
        """
        try:
            real = path.resolve()
            near = [] if data_file is None else [data_file.parent.resolve(), data_file.resolve().parent]
            near += [path_of(self.image_folder).resolve()] if self.image_folder and near else []
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{location}: {shown(str(path))} cannot be followed ({error}).") from None
        is_of_system = any(real.is_relative_to(each) for each in NEVER) and not real.is_relative_to(SHARED_MEMORY)
        if is_of_system:
            raise DataError(f"{location}: {printable(path)} leads to {printable(real)}, which holds no data; not read.")
        if near and not any(real.is_relative_to(each) for each in near):
            raise DataError(
                f"{location}: {printable(path)} leads to {printable(real)}, outside of the data's folder "
                f"{printable(near[0])}; not read. Name the folder of the images as image_folder."
            )
        return real

    def expansion(self, size: tuple[int, int], location: str) -> np.ndarray:
        """[n] int32, the tokens that the processor writes in place of one placeholder for an image of (height, width);
        with `text_around` without that.

        Raises:
            DataError: the processor fails on an image of this size.
        """
        if size not in self._expansion_of:
            from PIL import Image

            try:
                made = self.processor(
                    text=[self.text_around[0] if self.text_around else self.processor.tokenizer.decode([self.token])],
                    images=[Image.new("RGB", size[::-1])],
                    add_special_tokens=False,
                )
            except Exception as error:  # of many processors
                raise DataError(
                    f"{location}: {type(self.processor).__name__} fails on an image of {size[1]} x {size[0]} pixels "
                    f"({shown(str(error), 200)})."
                ) from error
            tokens = np.asarray(made["input_ids"][0], dtype=np.int32)
            self._expansion_of[size] = tokens[tokens == self.token] if self.text_around else tokens
        return self._expansion_of[size]

    def _kept(self, data: bytes, digest: str, location: str) -> Path:
        """The file of an image that came as bytes."""
        path = self.folder / digest
        try:
            if path.is_file() and path.read_bytes() != data:
                logger.warning("%s: damaged: the image is written again", path)
                path.unlink()
            if not path.is_file():
                with moved_into_place(path, is_durable=False) as part:
                    part.write_bytes(data)
        except OSError as error:
            raise DataError(
                f"{location}: {path} cannot be written ({error.strerror}); name another cache_dir."
            ) from None
        return path


def _value_of(image: object, location: str) -> str | bytes:
    """The path, the network address or the bytes of one entry of `images`."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path") or image.get("url") or image.get("image")
    if hasattr(image, "save") and hasattr(image, "convert"):  # decoded by `datasets`: PIL
        stream = io.BytesIO()
        image.save(stream, "PNG")
        return stream.getvalue()
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, str) or not image:
        raise DataError(
            f"{location}: an image is a path, bytes, or {{path: ...}} or {{bytes: ...}}, found {shown(image)}."
        )
    if image.startswith("data:"):
        head, comma, text = image.partition(",")
        try:
            if not comma or not head.endswith(";base64"):
                raise ValueError("no ';base64,' in it")
            return base64.b64decode(text, validate=True)
        except ValueError as error:
            raise DataError(f"{location}: a data address that cannot be read ({error}).") from None
    return image.removeprefix("file://")


def _file_bytes(path: Path, location: str, max_bytes: int) -> bytes:
    """Of a regular file: a pipe or a device would be read, or waited for, without end."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise DataError(f"{location}: {path} is not a regular file.")
            data = file.read(max_bytes + 1) if facts.st_size <= max_bytes else b""
    except DataError:  # a ValueError, too
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{location}: {path} cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    if max(facts.st_size, len(data)) > max_bytes:
        raise DataError(f"{location}: {path}: {_too_large(max(facts.st_size, len(data)), max_bytes)}")
    return data


def _too_large(num_bytes: int, limit: int) -> str:
    return f"an image of {num_bytes:,} bytes is larger than {limit:,} (max_image_bytes); shrink it, or raise the limit."
