"""Checkpoints that can be told from half-written ones, and from those of another run.

transformers writes its files straight into `checkpoint-N`. When all are there, a seal is written last: the size and
SHA-256 of every file, and what the run was (data, seed, trees per step). A folder without a valid seal is not a
checkpoint, whatever it holds.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from treewise.errors import CheckpointError

SEAL = "treewise.json"
_FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Folders `checkpoint-N` of a run, sealed or not, by step."""
    folder = Path(run_dir)
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted((path for path in found if path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match.group(1))


def write_seal(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Marks a checkpoint as complete."""
    files = {str(path.relative_to(checkpoint)): _identity(path, flush=True) for path in _files(checkpoint)}
    write_atomically(checkpoint / SEAL, json.dumps({"format": _FORMAT, **facts, "files": files}, indent=1))


def break_seal(checkpoint: Path) -> None:
    """Before a checkpoint is written anew: from here on it is incomplete."""
    (checkpoint / SEAL).unlink(missing_ok=True)


def read_seal(checkpoint: Path) -> dict[str, Any]:
    """What the checkpoint says of its run, after all of its files were compared with the seal.

    Raises:
        CheckpointError: no checkpoint, one that was not finished, or a file that is missing or damaged; names it.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such checkpoint.")
    try:
        seal = json.loads((checkpoint / SEAL).read_text())
        files = seal["files"]
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: incomplete (no {SEAL}); the run stopped while it was written.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint / SEAL}: damaged ({error}).") from None
    if seal.get("format") != _FORMAT:
        raise CheckpointError(f"{checkpoint / SEAL}: format {seal.get('format')!r}; this treewise reads {_FORMAT}.")
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing from the checkpoint.")
        if path.stat().st_size != expected["bytes"] or _identity(path) != expected:
            raise CheckpointError(f"{path}: not what was saved (damaged or changed); use an earlier checkpoint.")
    return dict(seal)


def newest(run_dir: str | Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and why newer ones were passed over."""
    passed_over = []
    for checkpoint in reversed(checkpoints(run_dir)):
        try:
            read_seal(checkpoint)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return checkpoint, passed_over
    return None, passed_over


def check_same_run(checkpoint: Path, seal: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raises unless the steps after this checkpoint would train what an uninterrupted run had trained.

    Raises:
        CheckpointError: other data (both fingerprints are named), another seed or another number of trees per step.
    """
    for name, now in facts.items():
        then = seal.get(name)
        if then == now:
            continue
        if name == "data":
            raise CheckpointError(
                f"{checkpoint} was trained on other data: fingerprint {then}, now {now}. "
                "Restore the data (same records, same order, same rendering), or start a new run from its weights."
            )
        raise CheckpointError(
            f"{checkpoint} was made with {name}={then!r}, now {now!r}; resumed steps would train on other trees."
        )


def prune(run_dir: str | Path, limit: int | None, keep: str | None) -> None:
    """Removes the oldest checkpoints beyond `limit`, never the newest one nor `keep`."""
    if not limit or limit < 1:
        return
    found = checkpoints(run_dir)
    removable = [path for path in found[:-1] if keep is None or path != Path(keep)]
    for path in removable[: max(0, len(found) - limit)]:
        break_seal(path)  # first, so that a half-removed folder is no checkpoint
        shutil.rmtree(path, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """The whole file or nothing, also when the machine stops."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != SEAL)


def _identity(path: Path, flush: bool = False) -> dict[str, Any]:
    with path.open("rb") as stream:
        if flush:
            os.fsync(stream.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
