"""What SQLite leaves out of a damaged write-ahead log (https://www.sqlite.org/fileformat2.html#walformat).

The log is a header and frames, one page each. A frame belongs to the log if it has the header's two salts and the
checksum of everything before it; SQLite reads up to the last frame that ends a transaction, and ends, without an error,
at the first frame that is wrong. A transaction that a killed process was writing has no last frame, and frames of
earlier times have other salts. So a last frame of a transaction with these salts, behind the place where SQLite ends,
is one that was committed and is lost. Of a database file without content SQLite removes the log, unread.

A log that was cut off at a frame looks whole. How many frames it had stands in its index, which a killed process
leaves (https://www.sqlite.org/walformat.html#the_wal_index_file_format). And a database says itself whether a log
belongs to it (`OPEN`): SQLite removes the log when it is closed.
"""

import shutil
import struct
import sys
from pathlib import Path
from typing import NamedTuple

_HEADER, _FRAME = struct.Struct(">8I"), struct.Struct(">6I")
_MAGIC = 0x377F0682  # its last bit: checksums are of big-endian words
_MASK = 0xFFFFFFFF
_INDEX, _COPIED = struct.Struct("=16x2I8x8s2I"), struct.Struct("=I")  # of its two heads, and behind them
_PAGE_SIZE, _APPLICATION_ID = slice(16, 18), slice(68, 72)  # in the header of a database
OPEN = 1  # its application id while a server has it open, and after one that was killed


class Lost(NamedTuple):
    """num_transactions: committed, and left out. frame: the first that is wrong, from 0; -1: the header is."""

    num_transactions: int
    frame: int
    num_frames: int


def lost_transactions(log: Path, page_size: int, *, is_read: bool = True) -> Lost | None:
    """What SQLite leaves out of a log; None: nothing. Frames of this log have one of its two salts at least, as
    the other may be what is damaged. is_read: whether SQLite reads the log at all."""
    content = log.read_bytes() if log.is_file() else b""
    if len(content) < _HEADER.size:
        return None
    magic, _, size, _, *salts, first, second = _HEADER.unpack_from(content)
    order, step = "big" if magic & 1 else "little", _FRAME.size + page_size
    sums, is_whole = _summed(content[: _HEADER.size - 8], order, (0, 0)), is_read
    if magic | 1 != _MAGIC | 1 or size != page_size or sums != (first, second):
        is_whole = False
    wrong, num_lost, num_frames = -1, 0, (len(content) - _HEADER.size) // step
    for index in range(num_frames):
        begin = _HEADER.size + index * step
        _, ends, *own, first, second = _FRAME.unpack_from(content, begin)
        if is_whole:
            sums = _summed(content[begin : begin + 8], order, sums)
            sums = _summed(content[begin + _FRAME.size : begin + step], order, sums)
            if own == salts and sums == (first, second):
                continue
            is_whole, wrong = False, index
        num_lost += bool(ends) and any(a == b for a, b in zip(own, salts, strict=True))
    return Lost(num_lost, wrong, num_frames) if num_lost else None


class Index(NamedTuple):
    """Of a log: frames of transactions that were committed, those of them that are in the database, and its salts."""

    num_frames: int
    num_copied: int
    salts: bytes


def index_of(path: Path) -> Index | None:
    """What the index of a log says; None where there is none, or not a whole one."""
    content = path.read_bytes()[:100] if path.is_file() else b""
    if len(content) < 100 or content[:48] != content[48:96]:
        return None
    num_frames, _, salts, *sums = _INDEX.unpack_from(content)
    is_whole = _summed(content[:40], sys.byteorder, (0, 0)) == tuple(sums)
    return Index(num_frames, _COPIED.unpack_from(content, 96)[0], salts) if is_whole else None


def _summed(content: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """SQLite's checksum of 32-bit words, from the one before them."""
    first, second = sums
    for low, high in struct.iter_unpack(">2I" if order == "big" else "<2I", content):
        first = (first + low + second) & _MASK
        second = (second + high + first) & _MASK
    return first, second


def keep_what_is_lost(database: Path) -> str | None:
    """Copies a database and its log, before SQLite reads them, where it would leave something out. A line that says so;
    None: nothing is lost, as far as can be known."""
    log, index = (database.with_name(f"{database.name}-{part}") for part in ("wal", "shm"))
    start = b""
    if database.is_file():
        with database.open("rb") as file:
            start = file.read(_APPLICATION_ID.stop)
    has_content = len(start) > 1  # SQLite takes one byte as none
    page_size = {0: 4096, 1: 65536}.get(size := int.from_bytes(start[_PAGE_SIZE], "big"), size)
    lost = lost_transactions(log, page_size, is_read=has_content)
    what = _damage(lost) if lost else _cut(log, start, index_of(index), page_size) if has_content else None
    if what is None:
        return None
    number = 1
    while (aside := database.with_name(f"{database.name}.damaged-{number}")).exists():
        number += 1
    if log.is_file():
        shutil.copy2(log, aside.with_name(f"{aside.name}-wal"))
    if lost and not has_content:
        aside.touch()
        return (
            f"{database}: missing or empty, so the {lost.num_transactions} writes in its log are lost. The log was "
            f"copied to {aside}-wal. If a backup has the database, put that and the log back."
        )
    shutil.copy2(database, aside)
    copies = f"Both files were copied to {aside} and {aside.name}-wal" if log.is_file() else f"It was copied to {aside}"
    return f"{log}: {what}; what was before is read. {copies}. If a backup has it whole, put that back."


def _damage(lost: Lost) -> str:
    what = "header" if lost.frame < 0 else f"frame {lost.frame} of {lost.num_frames}"
    return f"damaged in its {what}, so the {lost.num_transactions} writes from there on are lost"


def _cut(log: Path, start: bytes, index: Index | None, page_size: int) -> str | None:
    """What a log lacks that was committed and is in no database; None where nothing says so. start: of the database."""
    if not log.is_file():
        is_open = int.from_bytes(start[_APPLICATION_ID], "big") == OPEN
        was_empty = index is not None and index.num_frames == index.num_copied
        return "missing, so the last writes are lost" if is_open and not was_empty else None
    content = log.read_bytes()[: _HEADER.size]
    is_of_it = index is not None and (len(content) < _HEADER.size or content[16:24] == index.salts)
    num_frames = max(0, log.stat().st_size - _HEADER.size) // (_FRAME.size + page_size)
    if index is None or not is_of_it or num_frames >= index.num_frames or index.num_copied >= index.num_frames:
        return None
    return f"cut off behind {num_frames} of {index.num_frames} frames, so the writes from there on are lost"
