"""Rows on disk: rendered data by content hash, rendered once; and the rows of one load that exceed the memory.

An entry is one Parquet file (a memory-mapped Arrow file where the rows exceed what is held in memory), never a pickle.
It is written beside its place and moved there, so a killed process leaves nothing half-written; on reading, page
checksums and the content hash are verified, and a damaged entry is rendered again.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import treewise
from treewise.data.io.rows import SCHEMA, Row, content_hash, rows_to_table
from treewise.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

READING = 1  # raised where a record is read as other rows than before: tests/data/io/test_cache.py says when
ENTRY_FIELD = b"treewise"
READ_BYTES = 1 << 20
MAPPED = ".arrow"  # suffix of entries that are memory-mapped
MAX_MEMORY_BYTES = 1 << 30  # of rendered rows; beyond, they go to a file
FLUSH_BYTES = 1 << 25


def cache_folder(folder: str | Path | None) -> Path:
    """The folder of the cache: as given, `$TREEWISE_CACHE`, or `~/.cache/treewise`."""
    return Path(folder or os.environ.get("TREEWISE_CACHE") or "~/.cache/treewise").expanduser()


def cache_key(settings: Iterable[str], files: Iterable[Path]) -> str:
    """Hash of all that rows depend on: settings, names and content of files, and the version of what reads them."""
    digest = hashlib.sha256(json.dumps([READING, treewise.__version__, *settings]).encode())
    for path in files:
        digest.update(f"\n{path}\n".encode(errors="surrogateescape"))
        with path.open("rb") as stream:
            while block := stream.read(READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash of a tokenizer: its rules, added tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    added = sorted((i, str(t)) for i, t in tokenizer.added_tokens_decoder.items())
    rest = [type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map, added]
    return hashlib.sha256((rules + json.dumps(rest, default=str, sort_keys=True)).encode()).hexdigest()


def write_entry(path: Path, table: pa.Table, facts: dict[str, Any]) -> None:
    """Writes an entry and moves it into place. `facts` are plain JSON values that belong to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = _new_file(path.parent, ".write-", path.suffix)
    try:
        stored = table.replace_schema_metadata({ENTRY_FIELD: json.dumps(facts).encode()})
        if path.suffix == MAPPED:
            with pa.ipc.new_file(name, stored.schema) as writer:
                writer.write_table(stored)
        else:
            pq.write_table(stored, name, compression="zstd", write_page_checksum=True)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_entry(path: Path) -> tuple[pa.Table, dict[str, Any]] | None:
    """A verified entry, or None where there is none.

    Raises:
        DataError: a damaged entry.
    """
    if not path.is_file():
        return None
    try:
        if path.suffix == MAPPED:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        else:
            table = pq.read_table(path, page_checksum_verification=True, memory_map=False)
        facts = json.loads((table.schema.metadata or {})[ENTRY_FIELD])
        sound = table.schema.equals(SCHEMA) and content_hash(table, facts["names"]) == facts["fingerprint"]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged cache entry ({type(error).__name__})") from None
    if not sound:
        raise DataError(f"{path}: damaged cache entry (its content hash differs)")
    return table, facts


class RowStore:
    """Collects the rows of trees in order of arrival: in memory while they are few, in a mapped Arrow file when many.

    folder: where a file is written, if one is needed. Its name is removed in the end where the system allows that, so
    nothing is left behind; the table keeps the file alive.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: list[int] = []
        self._rows: list[Row] = []
        self._num_bytes = 0
        self._path: str | None = None
        self._writer: Any = None

    @property
    def is_mapped(self) -> bool:
        """Whether the rows went to a file."""
        return self._writer is not None

    def add(self, tree: int, rows: list[Row]) -> None:
        """Rows of a tree, after those that it has already. Raises `DataError` where a file cannot be written."""
        self._trees += [tree] * len(rows)
        self._rows += rows
        self._num_bytes += sum(each.nbytes for row in rows for each in (row.token_ids, *row.streams.values()))
        if self._num_bytes > (FLUSH_BYTES if self.is_mapped else MAX_MEMORY_BYTES):
            self._flush()

    def finish(self, index_of_tree: np.ndarray) -> pa.Table:
        """The table of all rows. index_of_tree: [trees added] int64, the final index of each."""
        if not self.is_mapped:
            order = np.argsort(self._trees, kind="stable").tolist()
            trees = [int(index_of_tree[self._trees[i]]) for i in order]
            table = rows_to_table(trees, [self._rows[i] for i in order])
            self._rows = []
            return table
        self._flush()
        self._writer.close()
        table = pa.ipc.open_file(pa.memory_map(self._path)).read_all()
        trees = index_of_tree[table.column("tree").to_numpy()].astype(np.int32)
        return table.set_column(0, SCHEMA.field("tree"), pa.array(trees))

    def close(self) -> None:
        """Removes the file's name. What maps it goes on to see it."""
        if self._path is not None:
            self._writer.close()
            with contextlib.suppress(PermissionError):  # Windows keeps files that are mapped
                Path(self._path).unlink(missing_ok=True)

    def _flush(self) -> None:
        table = rows_to_table(self._trees, self._rows)
        try:
            if self._writer is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._path = _new_file(self._folder, ".rows-", ".arrow")
                self._writer = pa.ipc.new_file(self._path, SCHEMA)
            self._writer.write_table(table)
        except OSError as error:
            raise DataError(
                f"{self._folder}: rendered rows cannot be written ({error.strerror or error}); name a folder with room "
                "by TREEWISE_CACHE, or cache_dir=."
            ) from error
        self._trees, self._rows, self._num_bytes = [], [], 0


def _new_file(folder: Path, prefix: str, suffix: str) -> str:
    handle, name = tempfile.mkstemp(dir=folder, prefix=prefix, suffix=suffix)
    os.close(handle)
    return name
