"""Files to raw records, with the location of each (`rollouts.jsonl:17`), and to objects.

Nothing is skipped silently: a file that is damaged, cut short or of another kind than its suffix is a `DataError`.
Reading a file only cuts it into lines; each is parsed in the worker processes.
"""

import errno
import glob
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from treewise.base import features
from treewise.base.paths import path_of
from treewise.data.io.field_checks import json_kind, printable, shown
from treewise.errors import DataError

PathLike = str | Path
FOLDER_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")  # what a folder is searched for; `.json` must be named
SUFFIXES = (*FOLDER_SUFFIXES, ".json", ".json.gz")
UTF8_MARK = b"\xef\xbb\xbf"
GZIP_MAGIC = b"\x1f\x8b"
BLOCK_BYTES = 1 << 20
DEFAULT_MAX_RECORD_BYTES = 1 << 28  # 256 MiB: a line, or a .json file, which is read whole


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record before parsing: `payload` is the bytes of a line, or an object that a reader already parsed."""

    location: str
    payload: bytes | dict[str, Any]
    offset: int = 0  # of the payload in the (decompressed) file, in bytes
    is_tail: bool = False  # the last line, without a line end
    is_row: bool = False  # a Parquet row: nested columns may be padded with nulls
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A record, or a node of one, as it was written, and where.

    file: the data file, beside which side files and images lie; None: none.
    """

    location: str
    value: dict[str, Any]
    file: Path | None = None


def find_files(paths: PathLike | Sequence[PathLike]) -> list[Path]:
    """Data files behind paths, folders and globs, in a fixed order, each once.

    Raises:
        DataError: no file, or a file of an unknown kind.
    """
    several: Any = paths
    named = [paths] if isinstance(paths, str | Path) else list(several) if isinstance(several, list | tuple) else None
    if named is None or not all(isinstance(path, str | Path) for path in named):
        raise DataError(f"data paths must be text, a Path or a list of these, found {shown(paths)}.")
    if not named:
        raise DataError("no data paths given; name at least one .jsonl, .jsonl.gz, .json or .parquet file.")
    files = [file for path in named for file in _files_of(path)]
    unique = {file.resolve(): file for file in reversed(files)}
    return sorted(unique.values(), key=files.index)


def read_bytes(path: Path, max_bytes: int = DEFAULT_MAX_RECORD_BYTES) -> bytes:
    """The whole (decompressed) content of a small side file.

    Raises:
        DataError: a file that is damaged, cannot be read, or holds more than `max_bytes`.
    """
    with errors_named(path):
        check_magic(path)
        with _open(path) as stream:
            data = stream.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise DataError(_too_long(printable(path), "the file", max_bytes))
        return data


@contextmanager
def errors_named(path: Path) -> Iterator[None]:
    """Inside, what cannot be read is a `DataError` that names the file."""
    try:
        yield
    except EOFError:
        raise DataError(
            f"{printable(path)}: the gzip file is cut short; write it again or restore it from its source."
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{printable(path)}: damaged gzip data ({error}); write it again or restore it.") from None
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({error.strerror or error}).") from error


def stem(path: Path) -> str:
    """File name without its data suffix: `mini` of `mini.jsonl.gz`."""
    suffix = max((s for s in SUFFIXES if path.name.endswith(s)), key=len, default=path.suffix)
    return path.name[: len(path.name) - len(suffix)]


def tool_files(data_file: Path) -> list[Path]:
    """Files that `tools_ref` of a data file may point into, nearest first; those that exist."""
    names = (f"{stem(data_file)}_tools.json", "tools.json")
    paths = [data_file.parent / f"{name}{suffix}" for name in names for suffix in ("", ".gz")]
    return [path for path in paths if path.is_file()]


def _files_of(path: PathLike) -> Iterable[Path]:
    if not str(path).strip():
        raise DataError("a data path is empty; name a file, a folder or a glob.")
    try:
        return _expand(path_of(path))
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, holds a zero byte or no such user
        if isinstance(error, DataError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{shown(str(path))}: cannot be looked up ({reason}).") from None


def _expand(path: Path) -> Iterable[Path]:
    if path.is_dir():
        candidates = (file for file in path.iterdir() if file.name.endswith(FOLDER_SUFFIXES) and file.is_file())
        files = sorted(file for file in candidates if not file.name.startswith("."))
        if not files:
            raise DataError(
                f"{printable(path)}: the folder holds no {', '.join(FOLDER_SUFFIXES)} file; name the files."
            )
        return files
    if not path.exists() and glob.has_magic(str(path)):
        names = glob.glob(str(path), recursive=True)
        files = sorted(Path(name) for name in names if name.endswith(SUFFIXES) and Path(name).is_file())
        if not files:
            raise DataError(f"{printable(path)}: the pattern matches no {', '.join(SUFFIXES)} file.")
        return files
    if not path.exists():
        is_address = str(path).find(":/") > 1  # not the letter of a drive
        hint = " Data are read from files and from the hub (hf:org/name); download it first." if is_address else ""
        if path.is_symlink():
            hint = f" It is a symbolic link to {printable(path.readlink())}, which leads nowhere."
        raise DataError(f"{printable(path)}: no such file or folder.{hint}")
    if not path.is_file():
        raise DataError(
            f"{printable(path)}: not a regular file (a pipe or a device); write its content into a file first."
        )
    if not path.name.endswith(SUFFIXES):
        hint = " Write one JSON object a line."
        if path.suffix in (".pt", ".pth"):
            hint = " A dump of torch.save becomes rows by `treewise import`."
        raise DataError(f"{printable(path)}: unknown kind of file; supported are {', '.join(SUFFIXES)}.{hint}")
    return [path]


def check_magic(path: Path) -> None:
    """Raises `DataError` for an empty file, and for one of another kind than its name says."""
    with path.open("rb") as stream:
        head = stream.read(4)
    if not head:
        raise DataError(f"{printable(path)}: no record; the file is empty.")
    if path.name.endswith(".gz"):
        if not head.startswith(GZIP_MAGIC):
            raise DataError(
                f"{printable(path)}: not a gzip file (it starts with {shown(head)}); rename it or compress it."
            )
    elif path.name.endswith(".parquet"):
        if head != b"PAR1":
            raise DataError(f"{printable(path)}: not a Parquet file (it starts with {shown(head)}, not b'PAR1').")
    elif head.startswith(GZIP_MAGIC):
        raise DataError(f"{printable(path)}: gzip data in a file without .gz; rename it to {printable(path.name)}.gz.")
    elif head == b"PAR1":
        raise DataError(
            f"{printable(path)}: a Parquet file under another name; rename it to {printable(stem(path))}.parquet."
        )


def read_text(path: Path) -> str:
    """The text of a UTF-8 file that a user names (a configuration, a template), without a byte-order mark.

    Raises:
        OSError: with the reason in `strerror`; also for a pipe, which would be waited for, a device, which may have no
            end, and bytes that are not UTF-8.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError(errno.EINVAL, "a pipe or a device; write its content into a file first", str(path))
        return path.read_text(encoding="utf-8-sig")
    except ValueError as error:  # or a path that no file can have
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise OSError(errno.EINVAL, reason, str(path)) from None


def _open(path: Path) -> BinaryIO:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb", buffering=BLOCK_BYTES)


def _too_long(location: str, what: str, limit: int) -> str:
    return f"{location}: {what} holds more than {limit:,} bytes (max_record_bytes); raise it if that is meant."


def json_lines(path: Path, limit: int) -> Iterator[RawRecord]:
    """Records of a file, one a line. Blank lines are passed over; line numbers stay physical."""
    with _open(path) as stream:
        offset = number = 0
        while line := stream.readline(limit + 2):  # and its line end
            number += 1
            start, offset = offset, offset + len(line)
            body, location = line.rstrip(b"\r\n"), f"{printable(path)}:{number}"
            if len(body) > limit:
                raise DataError(_too_long(location, "the line", limit))
            if body.startswith(UTF8_MARK):  # of the file, or of one that was put behind another
                body, start = body[len(UTF8_MARK) :], start + len(UTF8_MARK)
            if body.strip():
                yield RawRecord(location, body, start, not line.endswith(b"\n"), num_bytes=len(line))
                continue
            while skipped := _blank_lines(stream):  # there may be millions
                number, offset = number + skipped.count(b"\n"), offset + len(skipped)


def _blank_lines(stream: Any) -> bytes:
    """The blank lines that follow and are in the buffer, which are read; empty where a line with something follows."""
    ahead: bytes = stream.peek(BLOCK_BYTES)[:BLOCK_BYTES]
    blank = ahead[: len(ahead) - len(ahead.lstrip(b" \t\r\n"))]
    skipped = blank[: blank.rfind(b"\n") + 1]
    return stream.read(len(skipped)) if skipped else b""


class PartialTailError(DataError):
    """The last line of a file, cut off while it was written."""

    def __init__(self, location: str) -> None:
        super().__init__(
            f"{location}: incomplete final line (the writer stopped in the middle); "
            "remove it, or leave it out: on_bad_record quarantine, or in Python allow_partial_tail=True."
        )


class _RepeatedKeyError(Exception):
    """A key that one object holds twice, of which `json` would silently keep the last."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(next(key for key in keys if keys.count(key) > 1))
    return record


def parse_text(text: str, location: str) -> object:
    """JSON inside a string (a Parquet column, the arguments of a tool call)."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # an error for half of a surrogate pair
        return value
    except _RepeatedKeyError as error:
        raise DataError(f"{location}: the key {shown(error.args[0])} is given twice in one object.") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{location}: text that is not valid JSON (character {error.pos}: {error.msg}): {shown(text)}. Give the "
            "value itself, or its JSON."
        ) from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{location}: JSON that cannot be read ({type(error).__name__}).") from None


def parsed_object(raw: RawRecord, *, is_padded: bool = False) -> dict[str, Any]:
    """The record as the file holds it. Raises as `parse`.

    is_padded: leave nulls out of structs, which Arrow pads for the keys of other rows.
    """
    if not isinstance(raw.payload, bytes):
        found: dict[str, Any] = raw.payload
        if raw.is_row:
            found = features.tables.row_values(raw.payload, raw.location, is_padded)
        refuse_half_pairs(found, raw.location)
        return found
    try:
        text = raw.payload.decode()
        value = json.loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        if raw.is_tail and error.reason == "unexpected end of data":
            raise PartialTailError(raw.location) from None
        at = raw.offset + error.start
        raise DataError(f"{raw.location}: not UTF-8 at byte {at} of the file; save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        if raw.is_tail and text[:1] == "{" and text[1:2] != "\0":  # the beginning of a record
            raise PartialTailError(raw.location) from None
        near = shown(text[max(0, error.pos - 15) : error.pos + 15])
        ways = {"{": " A record is one line: jq -c . FILE > NEW.jsonl.", "[": " Name a file of one list NEW.json."}
        hint = " It is UTF-16, or no text; save it as UTF-8." if "\0" in text else ways.get(text.strip(), "")
        raise DataError(f"{raw.location}:{error.colno}: not valid JSON: {error.msg}, near {near}.{hint}") from None
    except _RepeatedKeyError as error:
        raise DataError(f"{raw.location}: the key {shown(error.args[0])} is given twice in one object.") from None
    except RecursionError:
        raise DataError(f"{raw.location}: JSON nested too deeply to read.") from None
    except ValueError as error:
        raise DataError(f"{raw.location}: JSON that cannot be read ({shown(str(error))}).") from None
    if not isinstance(value, dict):
        raise DataError(f"{raw.location}: a record must be a JSON object, found {json_kind(value)}.")
    if b"\\ud" in raw.payload or b"\\uD" in raw.payload:
        _check_surrogates(text, value, raw)
    return value


def _check_surrogates(text: str, value: dict[str, Any], raw: RawRecord) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        at = text.lower().find(f"\\u{code:04x}")
        column = "" if at < 0 else f" at byte {raw.offset + len(text[:at].encode())} of the file"
        raise DataError(f"{raw.location}: {_no_text(code, column)}") from None


def refuse_half_pairs(value: object, location: str) -> None:
    """Raises `DataError` for half of a surrogate pair in a text of nested values: it is no text to any tokenizer."""
    try:
        code = _half_pair_in(value)
    except RecursionError:
        raise DataError(f"{location}: nested too deeply to read.") from None
    if code is not None:
        raise DataError(f"{location}: {_no_text(code)}")


def _half_pair_in(value: object) -> int | None:
    if isinstance(value, str):
        try:
            value.isascii() or value.encode()
        except UnicodeEncodeError as error:
            return ord(value[error.start])
        return None
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if not isinstance(value, list | tuple) or not value:
        return None
    if isinstance(value[0], int | float) and isinstance(value[-1], int | float):  # ids and numbers
        return None
    return next((code for item in value if (code := _half_pair_in(item)) is not None), None)


def _no_text(code: int, place: str = "") -> str:
    return f"lone surrogate \\u{code:04x}{place} is not text; escape pairs in full or replace it."


def raw_text(raw: RawRecord) -> str:
    """The record as text, however bad it is."""
    if isinstance(raw.payload, bytes):
        return raw.payload.decode(errors="replace")
    with suppress(DataError):
        return json.dumps(parsed_object(raw), default=str)
    return json.dumps(raw.payload, default=str)
