"""Files that treewise wrote and reads again: one reader, which names the file and what to do; checksums inside. And the
error where a disk has no room for them.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from treewise.errors import ConfigError, DiskError, TreewiseError, bytes_as_text

T = TypeVar("T")

CHECKSUM = "checksum"
_MAX_REASON = 120


def read_own(path: Path, read: Callable[[bytes], T], advice: str, error: type[TreewiseError] = ConfigError) -> T:
    """What `read` makes of the content of a file that treewise wrote: the one reader of such files.

    Raises:
        error: the file cannot be read, or `read` raises anything: `PATH: damaged (REASON); ADVICE`.
    """
    try:
        return read(path.read_bytes())
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror or problem}); {advice}.") from None
    except Exception as problem:  # of JSON, YAML, and of whatever takes a damaged value
        raise error(f"{path}: damaged ({damage(problem)}); {advice}.") from None


def damage(problem: Exception) -> str:
    """One short line of what is wrong with a file."""
    name = "" if isinstance(problem, TreewiseError | ValueError) else f"{type(problem).__name__}: "
    text = " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
    return ascii(name + text)[1:-1][:_MAX_REASON]


def sealed(content: Mapping[str, Any], indent: int | None = None) -> str:
    """An object of plain JSON values as text, with a checksum of all else in it."""
    checksum = hashlib.sha256(json.dumps(content, indent=indent).encode()).hexdigest()
    return json.dumps({**content, CHECKSUM: checksum}, indent=indent)


def unsealed(data: bytes, indent: int | None = None, *, may_lack: bool = False) -> dict[str, Any]:
    """The object of a `sealed` text. Raises `ValueError` where it is not what was sealed.

    may_lack: an object without a checksum is taken as it is.
    """
    text = data.decode().rstrip("\n")
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__}, not an object")
    if may_lack and CHECKSUM not in content:
        return content
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    if sealed(rest, indent) != text:
        raise ValueError("its checksum differs")
    return rest


# -- writing ----------------------------------------------------------------------------------------------------------


def room_at(path: Path) -> str:
    """The bytes that are free on the disk of a file or folder, there or not: `1.20 GiB free`."""
    there = next(each for each in (path, *path.parents) if each.exists() or each == each.parent)
    with suppress(OSError):
        return f"{bytes_as_text(shutil.disk_usage(there).free)} free"
    return "an unknown number of bytes free"


def is_no_room(error: BaseException) -> bool:
    """Whether a disk, a quota or a limit on files is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_error(path: Path, error: Exception, num_bytes: int) -> DiskError:
    """The error where a file cannot be written. num_bytes: that had to be."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    needed = f"{bytes_as_text(num_bytes)} needed, " if num_bytes else ""
    found = DiskError(f"{path} cannot be written ({reason}): {needed}{room_at(path)} on its disk. Make room.")
    found.__cause__ = error
    return found
