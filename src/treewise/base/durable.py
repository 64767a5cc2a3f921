"""Files that are whole or not there, whenever a process is killed or the machine stops: the one place that writes aside
and renames.
"""

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from treewise.base.own_files import disk_error
from treewise.errors import ConfigError

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


@contextmanager
def own_file(path: Path, mode: str) -> Iterator[Any]:
    """A file of a run's folder, opened for writing. Errors name it, also those of a disk in the middle of a write.

    Raises:
        ConfigError: a link in its place, which somebody else may have put there, and which could lead anywhere.
    """
    try:
        encoding = None if "b" in mode else "utf-8"
        with open(
            path, mode, encoding=encoding, opener=lambda p, flags: os.open(p, flags | _NO_LINKS, 0o644)
        ) as stream:
            yield stream
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link, and a run writes plain files into its folder; remove it.") from None
        error.filename = error.filename or str(path)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """The whole file or nothing. One process writes it: what a killed one has left is written over."""
    temporary = path.with_name(f".{path.name}.tmp")
    with own_file(temporary, "wb" if isinstance(content, bytes) else "w") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    flush_folder(path.parent)


@contextmanager
def moved_into_place(
    path: Path, named: Callable[[Path], Path] | None = None, *, permissions: int = 0o644, is_durable: bool = True
) -> Iterator[Path]:
    """A new, empty file beside `path`, whose folder is made. It takes the place of `path` in the end, or goes. Several
    processes may write one at a time. named: gives the whole file another name. is_durable: False of what is checked
    when it is read, and made again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".write-{secrets.token_hex(8)}{path.suffix}")
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions))
    try:
        yield part
        if is_durable:
            flush_file(part)
        os.replace(part, path if named is None else named(part))
        if is_durable:
            flush_folder(path.parent)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def append(path: Path, content: bytes) -> None:
    """All of it behind what the file holds, on the disk, or nothing. Raises `DiskError`."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        with suppress(OSError):  # it is not there at all
            os.truncate(path, size)
        raise disk_error(path, error, len(content)) from error


def flush_folder(path: Path) -> None:
    """Makes the names in a folder durable, where the system can."""
    with suppress(PermissionError, NotADirectoryError):  # Windows opens no folders
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def flush_file(path: Path) -> None:
    """Makes the content of a file durable."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
