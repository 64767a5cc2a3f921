"""Files of weights (safetensors) of a folder: the sizes in their headers, and whether they are what was saved.

A model that a run or `grow` saves has a list of checksums beside it, a checkpoint its manifest. Headers are read
without safetensors: no size in one asks for memory before it is held against the file, and nothing is imported.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from treewise.base.own_files import damage, read_own, sealed, unsealed
from treewise.errors import ConfigError

INDEX = "model.safetensors.index.json"
CHECKSUMS = "model_checksums.json"
MANIFEST = "treewise.json"  # of a checkpoint
SUFFIX = ".safetensors"
_THREADS = 8


def header_of(file: Path) -> bytes:
    """The header of a file: JSON that names its tensors, types and shapes.

    Raises:
        ConfigError: it claims to be longer than the file.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > file.stat().st_size - 8:
            raise ConfigError(f"{file}: not a whole safetensors file (it claims a header of {size:,} bytes).")
        return stream.read(size)


def shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a file. Raises `ConfigError` where its header holds anything else."""
    try:
        found = json.loads(header_of(file))
        shapes = {name: tuple(each["shape"]) for name, each in found.items() if name != "__metadata__"}
        if all(type(size) is int and size >= 0 for shape in shapes.values() for size in shape):
            return shapes
        raise ValueError("a size is no whole number")
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file}: not a whole safetensors file (its header: {damage(error)}).") from None


def shard_names(folder: Path) -> list[str]:
    """The files that the index of a folder names; none where it has no index.

    Raises:
        ConfigError: a damaged index, or one that names a file outside of its folder.
    """
    path = folder / INDEX
    if not path.is_file():
        return []
    names = read_own(path, lambda data: set(json.loads(data)["weight_map"].values()), "save the model again")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or name in ("", ".."):
            raise ConfigError(f"{path}: names {name!r:.80}, which is no file of its folder; save the model again.")
    return sorted(names)


# -- what was saved ---------------------------------------------------------------------------------------------------


def identity(path: Path, *, flush: bool = False) -> dict[str, Any]:
    """Size and SHA-256 of a file, which is flushed to the disk on request."""
    with path.open("rb") as stream:
        if flush:
            os.fsync(stream.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def identities(paths: Iterable[Path], *, flush: bool = False) -> list[dict[str, Any]]:
    """`identity` of several files."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda path: identity(path, flush=flush), paths))


def write_checksums(folder: Path) -> None:
    """Lists the files of weights in a folder with their checksums."""
    files = sorted(folder.rglob(f"*{SUFFIX}"))
    names = [path.relative_to(folder).as_posix() for path in files]
    listed = dict(zip(names, identities(files), strict=True))
    (folder / CHECKSUMS).write_text(sealed({"files": listed}, indent=1), encoding="utf-8")


def check_saved(folder: Path) -> None:
    """Compares the files of weights in a folder with what was saved there, where something says what that was.

    Raises:
        ConfigError: a file that is missing, damaged or changed, by its list of checksums or its manifest.
    """
    path = next((folder / name for name in (CHECKSUMS, MANIFEST) if (folder / name).is_file()), None)
    if path is None:
        return
    again = "use an earlier checkpoint" if path.name == MANIFEST else "save the model again"
    listed = read_own(path, lambda data: unsealed(data, indent=1)["files"], again)
    files = {name: each for name, each in listed.items() if name.endswith(SUFFIX)}
    for name in files:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name}: missing, and {path.name} lists it; {again}.")
    for name, found in zip(files, identities(folder / name for name in files), strict=True):
        if found != files[name]:
            raise ConfigError(
                f"{folder / name}: not what was saved (damaged or changed); {again}, or remove {path.name} where the "
                "change is meant."
            )
