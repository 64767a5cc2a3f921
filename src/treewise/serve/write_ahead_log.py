"""What SQLite leaves out of a damaged write-ahead log (https://www.sqlite.org/fileformat2.html#walformat).

The log is a header and frames, one page each. A frame belongs to the log if it has the header's two salts and the
checksum of everything before it; SQLite reads up to the last frame that ends a transaction, and ends, without an error,
at the first frame that is wrong. A transaction that a killed process was writing has no last frame, and frames of
earlier times have other salts. So a last frame of a transaction with these salts, behind the place where SQLite ends,
is one that was committed and is lost. Of a database file without content SQLite removes the log, unread.
"""

import os
import shutil
import struct
from pathlib import Path
from typing import NamedTuple

_HEADER, _FRAME = struct.Struct(">8I"), struct.Struct(">6I")
_MAGIC = 0x377F0682  # its last bit: checksums are of big-endian words
_MASK = 0xFFFFFFFF


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


def _summed(content: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """SQLite's checksum of 32-bit words, from the one before them."""
    first, second = sums
    for low, high in struct.iter_unpack(">2I" if order == "big" else "<2I", content):
        first = (first + low + second) & _MASK
        second = (second + high + first) & _MASK
    return first, second


def keep_what_is_lost(database: Path) -> str | None:
    """Copies a database and its log, before SQLite reads them, where it would leave something out. A line that says so;
    None: nothing is lost."""
    log = database.with_name(f"{database.name}-wal")
    with database.open("rb") if database.is_file() else open(os.devnull, "rb") as file:
        start = file.read(18)
    page_size, has_content = (
        int.from_bytes(start[16:18], "big") or 4096,
        len(start) > 1,
    )  # SQLite takes one byte as none
    lost = lost_transactions(log, 65536 if page_size == 1 else page_size, is_read=has_content)
    if lost is None:
        return None
    number = 1
    while (aside := database.with_name(f"{database.name}.damaged-{number}")).exists():
        number += 1
    shutil.copy2(log, aside.with_name(f"{aside.name}-wal"))
    if not has_content:
        aside.touch()
        return (
            f"{database}: missing or empty, so the {lost.num_transactions} writes in its log are lost. The log was "
            f"copied to {aside}-wal. If a backup has the database, put that and the log back."
        )
    shutil.copy2(database, aside)
    what = "header" if lost.frame < 0 else f"frame {lost.frame} of {lost.num_frames}"
    return (
        f"{log}: damaged in its {what}, so the {lost.num_transactions} writes from there on are lost; what was before "
        f"is read. Both files were copied to {aside} and {aside.name}-wal. If a backup has it whole, put that back."
    )
