"""Rows that will be a table: in memory while they are few, in a memory-mapped Arrow file when they are many."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from treewise.data.io.rows import Row
from treewise.data.io.table import SCHEMA, rows_to_table
from treewise.errors import DataError

MAX_MEMORY_BYTES = 1 << 30  # of rendered rows; beyond, they go to a file
FLUSH_BYTES = 1 << 25


class RowStore:
    """Collects the rows of trees in order of arrival.

    folder: where a file is written, if one is needed. Its name is removed in the end where the system allows that, so
    nothing is left behind; the table keeps the file alive.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[tuple[int, Row]] = []
        self._num_bytes = 0
        self._path: Path | None = None
        self._writer: Any = None

    @property
    def is_mapped(self) -> bool:
        """Whether the rows went to a file."""
        return self._writer is not None

    def add(self, tree: int, rows: list[Row]) -> None:
        """Rows of a tree, after those that it has already. Raises `DataError` where a file cannot be written."""
        for row in rows:
            self._rows.append((tree, row))
            self._num_bytes += row.token_ids.nbytes + sum(values.nbytes for values in row.streams.values())
        limit = FLUSH_BYTES if self._writer is not None else MAX_MEMORY_BYTES
        if self._num_bytes > limit:
            self._flush()

    def finish(self, index_of_tree: np.ndarray) -> pa.Table:
        """The table of all rows. index_of_tree: [trees added] int64, the final index of each."""
        if self._writer is None:
            order = sorted(range(len(self._rows)), key=lambda i: self._rows[i][0])
            trees = [int(index_of_tree[self._rows[i][0]]) for i in order]
            table = rows_to_table(trees, [self._rows[i][1] for i in order])
            self._rows = []
            return table
        self._flush()
        self._writer.close()
        assert self._path is not None
        table = pa.ipc.open_file(pa.memory_map(str(self._path))).read_all()
        trees = index_of_tree[table.column("tree").to_numpy()].astype(np.int32)
        return table.set_column(0, SCHEMA.field("tree"), pa.array(trees))

    def close(self) -> None:
        """Removes the file's name. What maps it goes on to see it."""
        if self._path is None:
            return
        if self._writer is not None:
            self._writer.close()
        with contextlib.suppress(PermissionError):  # Windows keeps files that are mapped
            self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        table = rows_to_table([tree for tree, _ in self._rows], [row for _, row in self._rows])
        try:
            if self._writer is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(dir=self._folder, prefix=".rows-", suffix=".arrow")
                os.close(handle)
                self._path = Path(name)
                self._writer = pa.ipc.new_file(name, SCHEMA)
            self._writer.write_table(table)
        except OSError as error:
            raise DataError(
                f"{self._folder}: rendered rows cannot be written ({error.strerror or error}); name a folder with room "
                "by TREEWISE_CACHE, or cache_dir=."
            ) from error
        self._rows, self._num_bytes = [], 0
