"""Checkpoints that are complete or absent, and that belong to one run.

A checkpoint is written to `.checkpoint-N.saving`. When all files are there, each is read back, checked and flushed to
the disk, and the manifest is written (`manifest.py`). Then the folder gets its name, in one rename. A process that is
killed at any moment leaves either the old state or the new one; `recover` clears what is left over. A folder without a
valid manifest is not a checkpoint.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from treewise.errors import CheckpointError, bytes_as_text
from treewise.trainer.checkpoint.manifest import (
    MANIFEST,
    check_readable,
    flush_file,
    flush_folder,
    is_verified,
    read_manifest,
    remember,
    write_manifest,
)

_NAME = re.compile(r"checkpoint-(\d+)")
_MODEL_ASIDE = ".model.saving"
_ASIDE = re.compile(r"\.checkpoint-(\d+)\.(saving|replaced|[\w-]+\.upload)")


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


# -- writing ----------------------------------------------------------------------------------------------------------


def aside(run_dir: str | Path, step: int) -> Path:
    """Where the files of step `step` are written before they are a checkpoint."""
    return Path(run_dir) / f".checkpoint-{step}.saving"


def new_folder(run_dir: str | Path, step: int) -> Path:
    """An empty folder for the files of step `step`, not yet a checkpoint."""
    folder = aside(run_dir, step)
    if folder.exists():
        shutil.rmtree(folder)
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
    if checkpoint.exists():
        # A folder cannot be renamed over another. If this process dies between the two renames, `recover` undoes the
        # first one.
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(checkpoint, replaced)
    os.rename(folder, checkpoint)
    flush_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    remember(checkpoint)
    return checkpoint


def recover(run_dir: str | Path) -> list[str]:
    """Removes or restores unfinished folders of a killed process; returns a line for each. Only the holder of the run's
    lock may call this.
    """
    folder = Path(run_dir)
    lines = []
    shutil.rmtree(folder / _MODEL_ASIDE, ignore_errors=True)
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _ASIDE.fullmatch(path.name)
        if match is None:
            continue
        checkpoint = folder / f"checkpoint-{match.group(1)}"
        if match.group(2) == "replaced" and not checkpoint.exists():
            os.rename(path, checkpoint)
            lines.append(f"{checkpoint}: restored; the run stopped while it was being replaced")
        else:
            shutil.rmtree(path)
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
    match = _ASIDE.fullmatch(folder.name)
    step = match.group(1) if match else "?"
    with _explained(folder.parent, f"checkpoint of step {step}", num_bytes, "Earlier checkpoints"):
        yield


@contextmanager
def moved_into(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A new folder whose files are moved into `folder` in the end; where any cannot be written, none is.

    num_bytes: their size, for the message.

    Raises:
        CheckpointError: the disk is full or fails.
    """
    aside = folder / _MODEL_ASIDE
    with _explained(folder, "model", num_bytes, "Checkpoints"):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            yield aside
            for path in sorted(aside.rglob("*")):
                if path.is_file():
                    check_readable(path)
                    flush_file(path)  # some disks report that they are full only now
            for path in sorted(aside.rglob("*")):
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
        raise CheckpointError(
            f"{folder}: the {what} could not be saved ({reason}); it takes {bytes_as_text(num_bytes)}, "
            f"{_room(folder)} free. {untouched} are untouched."
        ) from error


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


def _room(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return bytes_as_text(shutil.disk_usage(folder).free)
    except OSError:
        return "an unknown number of bytes"
