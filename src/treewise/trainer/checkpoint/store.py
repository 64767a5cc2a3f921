"""Checkpoints that are complete or absent, and that belong to one run.

A checkpoint is written to `.checkpoint-N.saving`. When all files are there, each is read back, checked and flushed to
the disk, and the manifest is written: size and SHA-256 of every file, and the identity of the run (data, seed, trees
per step). Then the folder gets its name, in one rename. A process that is killed at any moment leaves either the old
state or the new one; `recover` clears what is left over. A folder without a valid manifest is not a checkpoint.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from treewise.errors import CheckpointError, bytes_as_text

MANIFEST = "treewise.json"
_FORMAT = 2
_NAME = re.compile(r"checkpoint-(\d+)")
_ASIDE = re.compile(r"\.checkpoint-(\d+)\.(saving|replaced)")
# Formats whose reading may run code. treewise never writes them.
_PICKLED = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Folders `checkpoint-N` of a run, with or without a manifest, by step."""
    folder = Path(run_dir)
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match.group(1))


# -- writing ----------------------------------------------------------------------------------------------------------


def new_folder(run_dir: str | Path, step: int) -> Path:
    """An empty folder for the files of step `step`, not yet a checkpoint."""
    folder = Path(run_dir) / f".checkpoint-{step}.saving"
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
    _write_manifest(folder, facts)
    checkpoint = folder.parent / f"checkpoint-{match.group(1)}"
    replaced = folder.parent / f".{checkpoint.name}.replaced"
    if checkpoint.exists():
        # A folder cannot be renamed over another. If this process dies between the two renames, `recover` undoes the
        # first one.
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(checkpoint, replaced)
    os.rename(folder, checkpoint)
    _flush_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return checkpoint


def recover(run_dir: str | Path) -> list[str]:
    """Removes or restores unfinished folders of a killed process; returns a line for each. Only the holder of the run's
    lock may call this.
    """
    folder = Path(run_dir)
    lines = []
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
    """Removes the oldest checkpoints beyond `limit`, never the newest complete one nor `keep`. Deletion errors are
    ignored.
    """
    if not limit or limit < 1:
        return
    found = checkpoints(run_dir)
    complete = [path for path in found if (path / MANIFEST).is_file()]
    needed = {path.resolve() for path in complete[-1:]} | ({Path(keep).resolve()} if keep else set())
    for path in found[: max(0, len(found) - limit)]:
        if path.resolve() not in needed:
            with suppress(OSError):
                (path / MANIFEST).unlink(missing_ok=True)  # first: a folder that is removed in part is not a checkpoint
                shutil.rmtree(path)


@contextmanager
def explained(folder: Path, num_bytes: int) -> Iterator[None]:
    """Turns the errors of a failed save into a `CheckpointError`.

    num_bytes: size of the checkpoint, for the message.
    """
    try:
        yield
    except (OSError, SafetensorError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CheckpointError(
            f"{folder.parent}: the checkpoint of step {_aside_step(folder)} could not be saved ({reason}); it takes "
            f"{bytes_as_text(num_bytes)}, {_room(folder.parent)} free. Earlier checkpoints are untouched."
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """The whole file or nothing, also when the machine stops."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    _flush_folder(path.parent)


def _write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    paths = _files(folder)
    for path in paths:
        _check_readable(path)
    with ThreadPoolExecutor(8) as pool:
        identities = pool.map(lambda path: _identity(path, flush=True), paths)
        files = {path.relative_to(folder).as_posix(): each for path, each in zip(paths, identities, strict=True)}
    for parent in {path.parent for path in paths}:
        _flush_folder(parent)
    write_atomically(folder / MANIFEST, json.dumps({"format": _FORMAT, **facts, "files": files}, indent=1))


def _check_readable(path: Path) -> None:
    """Raises `CheckpointError` if a file that was just written does not read back."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="numpy") as stream:
                stream.keys()
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path.name} reads back damaged ({error}); is the disk full or failing?") from error


# -- reading ----------------------------------------------------------------------------------------------------------


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after all of its files were compared with it.

    Raises:
        CheckpointError: no checkpoint, an unfinished one, or a file that is missing, damaged, pickled or outside the
            checkpoint; names it.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such checkpoint.")
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{checkpoint}: incomplete (no {MANIFEST}); the run stopped while it was written."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / MANIFEST}: damaged ({error}).") from None
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{checkpoint / MANIFEST}: format {manifest.get('format')!r}; this treewise reads {_FORMAT}."
        )
    root = checkpoint.resolve()
    for name, expected in files.items():
        path = checkpoint / name
        if not path.resolve().is_relative_to(root) or path.is_symlink():
            raise CheckpointError(f"{checkpoint / MANIFEST}: names {name!r}, which is not a file of the checkpoint.")
        if not path.is_file():
            raise CheckpointError(f"{path}: missing from the checkpoint.")
        if path.stat().st_size != expected["bytes"] or _identity(path) != expected:
            raise CheckpointError(f"{path}: not what was saved (damaged or changed); use an earlier checkpoint.")
    for path in _files(checkpoint):
        if path.suffix in _PICKLED:
            raise CheckpointError(f"{path}: pickled files are never read from a checkpoint, and treewise writes none.")
    return dict(manifest)


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


def check_same_run(checkpoint: Path, manifest: dict[str, Any], facts: dict[str, Any]) -> None:
    """Checks that the steps after this checkpoint train the trees that an uninterrupted run would.

    Raises:
        CheckpointError: other data (both fingerprints are named), another model, another seed or another number of
            trees per step.
    """
    for name, now in facts.items():
        then = manifest.get(name)
        if then == now:
            continue
        if name == "data":
            raise CheckpointError(
                f"{checkpoint} was trained on other data: fingerprint {then}, now {now}. "
                "Restore the data (same records, same order, same rendering), or start a new run from its weights."
            )
        if name == "model":
            raise CheckpointError(f"{checkpoint} was made with the model {then}, now {now}.")
        hint = ""
        if name == "trees_per_step":
            hint = " It is per_device_train_batch_size x gradient_accumulation_steps x processes: change another one."
        raise CheckpointError(
            f"{checkpoint} was made with {name}={then!r}, now {now!r}; resumed steps would train on other trees.{hint}"
        )


# -- files ------------------------------------------------------------------------------------------------------------


def _files(checkpoint: Path) -> list[Path]:
    found = sorted(path for path in checkpoint.rglob("*") if path.is_file() or path.is_symlink())
    return [path for path in found if path != checkpoint / MANIFEST]


def _identity(path: Path, flush: bool = False) -> dict[str, Any]:
    with path.open("rb") as stream:
        if flush:
            os.fsync(stream.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _flush_folder(path: Path) -> None:
    """Makes the names in a folder durable, where the system can."""
    with suppress(PermissionError, NotADirectoryError):  # Windows opens no folders
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _aside_step(folder: Path) -> str:
    match = _ASIDE.fullmatch(folder.name)
    return match.group(1) if match else "?"


def _room(folder: Path) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return bytes_as_text(shutil.disk_usage(folder).free)
    except OSError:
        return "an unknown number of bytes"
