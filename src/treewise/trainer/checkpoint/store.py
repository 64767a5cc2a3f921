"""Checkpoints that are complete or absent, and that belong to one run.

A checkpoint is written to `.checkpoint-N.saving`. When all files are there, each is read back, checked and flushed to
the disk, and the manifest is written: size and SHA-256 of every file, what the run was, and a checksum of its own. Then
the folder gets its name, in one rename. A process that is killed at any moment leaves either the old state or the new
one; `recover` clears what is left over. A folder without a valid manifest is not a checkpoint.

A checkpoint is what its manifest lists. Other files in the folder are neither checked nor read; only pickled ones are
an error, because other programs would read them.
"""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from treewise.base.durable import flush_file, flush_folder, write_atomically
from treewise.base.own_files import CHECKSUM, room_at, sealed
from treewise.base.weight_files import MANIFEST, identities, identity
from treewise.errors import CheckpointError, ConfigError, bytes_as_text

_NAME = re.compile(r"checkpoint-(\d+)")
_MODEL_ASIDE = ".model.saving"
_ASIDE = re.compile(r"\.checkpoint-(\d+)\.(saving|replaced)")
_WRITTEN = (
    ".json",
    ".jsonl",
    ".safetensors",
    ".yaml",
    ".lock",
    ".jinja",
    ".txt",
    ".model",
)  # suffixes of a run's files
_PLAIN = ("trainer_state.json", "log.jsonl")  # written by transformers, which follows links; by us, which do not
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Folders `checkpoint-N` of a run, with or without a manifest, by step."""
    folder = Path(run_dir)
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted((path for path in paths if path.is_dir() and not path.is_symlink()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match.group(1))


def check_places(run_dir: str | Path) -> None:
    """Raises `ConfigError` for what stands in the way of the files and folders that a run writes, before it begins."""
    folder = Path(run_dir)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_for_folder = any(each.fullmatch(path.name) for each in (_NAME, _ASIDE)) or path.name == _MODEL_ASIDE
        if path.is_symlink() and (is_for_folder or path.name in _PLAIN):
            if not (_NAME.fullmatch(path.name) and path.is_dir()):
                raise ConfigError(f"{path} is a link, and a run writes into its own folder alone; remove it.")
        elif is_for_folder and not path.is_dir():
            raise ConfigError(f"{path} is a file, and a run writes a folder of this name; move it away.")
        elif not is_for_folder and path.name.endswith(_WRITTEN) and path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no plain file"  # a pipe would be waited for
            raise ConfigError(f"{path} is {kind}, and a run writes a file of this name; move it away.")


def remove(path: Path) -> None:
    """Removes a folder, or a file, or a link and not what it leads to. Raises `OSError`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- writing ----------------------------------------------------------------------------------------------------------


def aside(run_dir: str | Path, step: int) -> Path:
    """Where the files of step `step` are written before they are a checkpoint."""
    return Path(run_dir) / f".checkpoint-{step}.saving"


def new_folder(run_dir: str | Path, step: int) -> Path:
    """An empty folder for the files of step `step`, not yet a checkpoint."""
    folder = aside(run_dir, step)
    remove(folder)
    folder.mkdir(parents=True)
    return folder


def publish(folder: Path, facts: dict[str, Any]) -> Path:
    """Writes the manifest of a folder of `new_folder` and gives it its name; returns the checkpoint.

    Raises:
        CheckpointError: a file that was just written cannot be read back.
        OSError: the manifest could not be written, or the folder not renamed.
    """
    match = _ASIDE.fullmatch(folder.name)
    assert match is not None
    write_manifest(folder, facts)
    checkpoint = folder.parent / f"checkpoint-{match.group(1)}"
    replaced = folder.parent / f".{checkpoint.name}.replaced"
    if checkpoint.exists() or checkpoint.is_symlink():
        # A folder cannot be renamed over another. If this process dies between the two renames, `recover` undoes the
        # first one.
        remove(replaced)
        os.rename(checkpoint, replaced)
    os.rename(folder, checkpoint)
    flush_folder(folder.parent)
    with suppress(OSError):
        remove(replaced)
    remember(checkpoint)
    return checkpoint


def recover(run_dir: str | Path) -> list[str]:
    """Removes or restores unfinished folders of a killed process; returns a line for each. Only the holder of the run's
    lock may call this.
    """
    folder = Path(run_dir)
    lines = []
    with suppress(OSError):
        remove(folder / _MODEL_ASIDE)
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _ASIDE.fullmatch(path.name)
        if match is None:
            continue
        checkpoint = folder / f"checkpoint-{match.group(1)}"
        if match.group(2) == "replaced" and not checkpoint.exists():
            os.rename(path, checkpoint)
            lines.append(f"{checkpoint}: restored; the run stopped while it was being replaced")
        else:
            remove(path)
            if match.group(2) == "saving":
                lines.append(f"{checkpoint}: never finished (the run stopped while it was written); removed")
    return lines


def prune(run_dir: str | Path, limit: int | None, keep: str | None) -> None:
    """Removes checkpoints older than the newest `limit` whose files are what was saved, but for `keep`. Damaged ones do
    not count: where fewer than `limit` are good, nothing is removed. Deletion errors are ignored.
    """
    if not limit or limit < 1:
        return
    folders = checkpoints(run_dir)
    if len(folders) <= limit:
        return
    num_good = 0
    while folders and num_good < limit:
        num_good += is_verified(folders.pop())
    keep_path = Path(keep).resolve() if keep else None
    for path in folders:
        if path.resolve() != keep_path:
            with suppress(OSError):
                (path / MANIFEST).unlink(missing_ok=True)  # first: a folder that is removed in part is not a checkpoint
                shutil.rmtree(path)


@contextmanager
def explained(folder: Path, num_bytes: int) -> Iterator[None]:
    """Turns the errors of a failed save into a `CheckpointError`.

    folder: of `new_folder`. num_bytes: size of the checkpoint, for the message.
    """
    step = folder.name.split("-")[1].split(".")[0]
    with _explained(folder.parent, f"checkpoint of step {step}", num_bytes, "Earlier checkpoints"):
        yield


@contextmanager
def moved_into(folder: Path, num_bytes: int, last: str) -> Iterator[Path]:
    """A new folder whose files are moved into `folder` in the end; where any cannot be written, none is.

    num_bytes: their size, for the message. last: the file that says what the others are, which is away while they are
    moved.

    Raises:
        CheckpointError: the disk is full or fails.
    """
    aside = folder / _MODEL_ASIDE
    with _explained(folder, "model", num_bytes, "Checkpoints"):
        try:
            remove(aside)
            aside.mkdir(parents=True)
            yield aside
            for path in sorted(aside.rglob("*")):
                if path.is_file():
                    check_readable(path)
                    flush_file(path)  # some disks report that they are full only now
            (folder / last).unlink(missing_ok=True)
            for path in sorted(aside.rglob("*"), key=lambda path: (path.name == last, path)):
                target = folder / path.relative_to(aside)
                if path.is_dir():
                    target.mkdir(exist_ok=True)
                else:
                    os.replace(path, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _explained(folder: Path, what: str, num_bytes: int, untouched: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, OSError) and error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP):
            place = error.filename2 or error.filename or folder
            raise CheckpointError(
                f"{folder}: the {what} could not be saved: {place} stands in its way ({reason}); move it away. "
                f"{untouched} are untouched."
            ) from error
        raise CheckpointError(
            f"{folder}: the {what} could not be saved ({reason}); it takes {bytes_as_text(num_bytes)}, "
            f"{room_at(folder)}. {untouched} are untouched."
        ) from error


def is_for_room(error: BaseException | None) -> bool:
    """Whether a save failed because the disk is full, or a quota or limit of files is reached."""
    while error is not None:
        if getattr(error, "errno", None) in _FULL or any(f"(os error {number})" in str(error) for number in _FULL):
            return True
        error = error.__cause__
    return False


# -- reading ----------------------------------------------------------------------------------------------------------


def newest(run_dir: str | Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and why newer ones were passed over."""
    passed_over = []
    for checkpoint in reversed(checkpoints(run_dir)):
        try:
            read_manifest(checkpoint)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return checkpoint, passed_over
    return None, passed_over


# -- the manifest ------------------------------------------------------------------------------------------------------


_FORMAT = 3
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
    names = [path.relative_to(folder).as_posix() for path in paths]
    files = dict(zip(names, identities(paths, flush=True), strict=True))
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


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What the run of a checkpoint was, from its manifest alone; its files are not compared with it.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    return _parsed(checkpoint)


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
        for each in listed:
            target = folder / each
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.symlink_to((checkpoint / each).resolve())
            except (OSError, NotImplementedError):  # a system that makes no links
                shutil.copyfile(checkpoint / each, target)
        yield folder


def sealed_text(content: dict[str, Any]) -> str:
    """The text of a manifest, with the checksum of all else in it."""
    return sealed(content, indent=1)


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
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    if sealed_text(rest) != text:
        raise CheckpointError(f"{path}: damaged (its checksum differs); use an earlier checkpoint.")
    root, files = checkpoint.resolve(), rest.get("files")
    if not isinstance(files, dict) or not all(isinstance(each, dict) and "bytes" in each for each in files.values()):
        raise CheckpointError(f"{path}: damaged (it lists no files); use an earlier checkpoint.")
    for name in files:
        if (checkpoint / name).is_symlink() or not _is_within(checkpoint / name, root):
            raise CheckpointError(f"{path}: names {name!r}, which is not a file of the checkpoint.")
    return rest


def _is_within(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError, ValueError):  # links that lead to themselves
        return False


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
