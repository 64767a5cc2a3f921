"""The manifest of a checkpoint: size and SHA-256 of every file, what the run was, and a checksum of its own.

A checkpoint is what its manifest lists. Other files in the folder are neither checked nor read; only pickled ones are
an error, because other programs would read them.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from treewise.errors import CheckpointError, ConfigError

MANIFEST = "treewise.json"
_FORMAT = 3
_CHECKSUM = "checksum"
# Formats whose reading may run code. treewise never writes them.
_PICKLED = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}

# Size, time and inode of every file of the checkpoints that this process has verified, so that old checkpoints are not
# hashed again at each save.
_verified: dict[Path, list[tuple[str, int, int, int]]] = {}


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Reads back, hashes and flushes all files of a folder, and writes their manifest.

    Raises:
        CheckpointError: a file that was just written cannot be read back.
        OSError: the manifest could not be written.
    """
    paths = _files(folder)
    for path in paths:
        check_readable(path)
    with ThreadPoolExecutor(8) as pool:
        identities = pool.map(lambda path: identity(path, flush=True), paths)
        files = {path.relative_to(folder).as_posix(): each for path, each in zip(paths, identities, strict=True)}
    for parent in {path.parent for path in paths}:
        flush_folder(parent)
    write_atomically(folder / MANIFEST, sealed_text({"format": _FORMAT, **facts, "files": files}))


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after all of its files were compared with it.

    Raises:
        CheckpointError: no checkpoint, an unfinished one, or a file that is missing, damaged, pickled or outside the
            checkpoint; names it.
    """
    manifest = _parsed(checkpoint)
    for name, expected in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing from the checkpoint.")
        if path.stat().st_size != expected["bytes"] or identity(path) != expected:
            raise CheckpointError(f"{path}: not what was saved (damaged or changed); use an earlier checkpoint.")
    for path in _files(checkpoint):
        if path.suffix in _PICKLED:
            raise CheckpointError(f"{path}: pickled files are never read from a checkpoint, and treewise writes none.")
    remember(checkpoint)
    return manifest


def is_verified(checkpoint: Path) -> bool:
    """Whether the files are what the manifest lists. Those of a checkpoint that this process has verified before are
    read again only where their sizes or times have changed.
    """
    try:
        if _verified.get(checkpoint.resolve()) != _state(checkpoint):
            read_manifest(checkpoint)
    except (CheckpointError, OSError):
        return False
    return True


def remember(checkpoint: Path) -> None:
    """Marks a checkpoint as verified by this process."""
    _verified[checkpoint.resolve()] = _state(checkpoint)


@contextmanager
def listed_files(checkpoint: Path) -> Iterator[Path]:
    """The checkpoint, or where other files lie in it a folder of links to those that the manifest lists: for loaders,
    which read whatever a folder holds.

    Raises:
        CheckpointError: the manifest is missing or damaged. Files are not compared with it (`read_manifest`).
    """
    listed = list(_parsed(checkpoint)["files"])
    if {path.relative_to(checkpoint).as_posix() for path in _files(checkpoint)} == set(listed):
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="treewise-") as name:
        folder = Path(name)
        for file in listed:
            link = folder / file
            link.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.symlink((checkpoint / file).resolve(), link)
            except (OSError, NotImplementedError):  # Windows may allow no links
                shutil.copyfile(checkpoint / file, link)
        yield folder


def sealed_text(content: dict[str, Any]) -> str:
    """The text of a manifest, with the checksum of all else in it."""
    body = json.dumps(content, indent=1)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**content, _CHECKSUM: checksum}, indent=1)


# -- files ------------------------------------------------------------------------------------------------------------


@contextmanager
def own_file(path: Path, mode: str) -> Iterator[Any]:
    """A file of a run's folder, opened for writing. Errors name it, also those of a disk in the middle of a write.

    Raises:
        ConfigError: a link in its place, which somebody else may have put there, and which could lead anywhere.
    """
    try:
        encoding = None if "b" in mode else "utf-8"
        with open(path, mode, encoding=encoding, opener=_without_links) as stream:
            yield stream
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link, and a run writes plain files into its folder; remove it.") from None
        error.filename = error.filename or str(path)
        raise


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o644)


def write_atomically(path: Path, text: str) -> None:
    """The whole file or nothing, also when the machine stops."""
    temporary = path.with_name(f".{path.name}.tmp")
    with own_file(temporary, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    flush_folder(path.parent)


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


def identity(path: Path, *, flush: bool = False) -> dict[str, Any]:
    """Size and SHA-256 of a file, which is flushed to the disk on request."""
    with path.open("rb") as stream:
        if flush:
            os.fsync(stream.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _parsed(checkpoint: Path) -> dict[str, Any]:
    """The manifest, checked by itself: its checksum, and names that stay in the checkpoint."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such checkpoint.")
    path = checkpoint / MANIFEST
    try:
        text = path.read_bytes().decode("utf-8")
        content = json.loads(text)
    except FileNotFoundError:
        is_named_so = re.fullmatch(r"checkpoint-\d+", checkpoint.name) is not None
        why = "the run stopped while it was written" if is_named_so else "name a folder checkpoint-N of a run"
        what = "incomplete" if is_named_so else "not a checkpoint"
        raise CheckpointError(f"{checkpoint}: {what} (no {MANIFEST}); {why}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); use an earlier checkpoint.") from None
    format_number = content.get("format") if isinstance(content, dict) else None
    if format_number != _FORMAT:
        raise CheckpointError(f"{path}: format {format_number!r}; this treewise reads {_FORMAT}.")
    rest = {key: value for key, value in content.items() if key != _CHECKSUM}
    if sealed_text(rest) != text:
        raise CheckpointError(f"{path}: damaged (its checksum differs); use an earlier checkpoint.")
    root, files = checkpoint.resolve(), rest.get("files")
    if not isinstance(files, dict) or not all(isinstance(each, dict) and "bytes" in each for each in files.values()):
        raise CheckpointError(f"{path}: damaged (it lists no files); use an earlier checkpoint.")
    for name in files:
        if not (checkpoint / name).resolve().is_relative_to(root) or (checkpoint / name).is_symlink():
            raise CheckpointError(f"{path}: names {name!r}, which is not a file of the checkpoint.")
    return rest


def check_readable(path: Path) -> None:
    """Raises `CheckpointError` if a file that was just written does not read back."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="numpy") as stream:
                stream.keys()
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path.name} reads back damaged ({error}); is the disk full or failing?") from error


def _files(checkpoint: Path) -> list[Path]:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() or path.is_symlink())
    return [path for path in files if path != checkpoint / MANIFEST]


def _state(checkpoint: Path) -> list[tuple[str, int, int, int]]:
    files = []
    for path in [checkpoint / MANIFEST, *_files(checkpoint)]:
        stat = path.lstat()
        files.append((path.relative_to(checkpoint).as_posix(), stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return files
