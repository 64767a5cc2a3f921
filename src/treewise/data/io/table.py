"""Rows as an Arrow table: what a dataset holds in memory and the cache on disk, and the content hash of it."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from treewise.data.io.rows import Row
from treewise.errors import DataError
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import STREAMS

IDS, FLOATS = pa.large_list(pa.int32()), pa.large_list(pa.float32())
SCHEMA = pa.schema(
    {
        "tree": pa.int32(),
        "shared": pa.int64(),
        "token_ids": IDS,
        "spans": pa.large_list(pa.int64()),
        "span_weights": FLOATS,
        **{name: IDS if np.issubdtype(stream.dtype, np.integer) else FLOATS for name, stream in STREAMS.items()},
        "group": pa.string(),
        "reward": pa.float64(),
        "rollout": pa.string(),
        "source": pa.string(),
        "parent": pa.int64(),
        "is_end": pa.bool_(),
        "images": pa.string(),
        "image_sources": pa.string(),
    }
)
NOT_HASHED = ("source", "image_sources")  # where it came from
LABELS = ("group", "rollout")  # stored as JSON: text and numbers stay apart


def rows_to_table(trees: Iterable[int], rows: Sequence[Row]) -> pa.Table:
    """A table with one line per row; `trees` gives the tree of each."""
    columns = {"tree": pa.array(trees, pa.int32())}
    for field in SCHEMA:
        if field.name == "tree":
            continue
        values: list[Any]
        if field.name in STREAMS:
            values = [row.streams.get(field.name) for row in rows]
        elif field.name == "images":
            values = [_as_json([(each.start, each.end, each.digest) for each in row.images]) for row in rows]
        elif field.name == "image_sources":
            values = [_as_json([each.source for each in row.images]) for row in rows]
        else:
            values = [getattr(row, field.name) for row in rows]
        if pa.types.is_large_list(field.type):
            columns[field.name] = _list_column(values, field.type)
        else:
            if field.name in LABELS:
                values = [None if value is None else json.dumps(value) for value in values]
            columns[field.name] = pa.array(values, field.type)
    return pa.table(columns, schema=SCHEMA)


def table_rows(table: pa.Table, low: int, high: int) -> list[Row]:
    """Rows `low` to `high`; their arrays are views of the table."""
    part = table.slice(low, high - low)
    columns: dict[str, list[Any]] = {}
    for field in SCHEMA:
        column = part.column(field.name)
        if pa.types.is_large_list(field.type):
            columns[field.name] = _views(column)
        else:
            columns[field.name] = column.to_pylist()
    rows = []
    for i in range(high - low):
        values = {name: column[i] for name, column in columns.items() if name != "tree"}
        streams = {name: values.pop(name) for name in STREAMS}
        values["streams"] = {name: value for name, value in streams.items() if value is not None}
        for name in LABELS:
            values[name] = None if values[name] is None else json.loads(values[name])
        values["spans"] = values["spans"].tolist()
        values["span_weights"] = values["span_weights"].tolist()
        sources, images = (json.loads(values.pop(name) or "[]") for name in ("image_sources", "images"))
        values["images"] = tuple(ImageSpan(source, *image) for source, image in zip(sources, images, strict=True))
        rows.append(Row(**values))
    return rows


def content_hash(table: pa.Table, names: Sequence[str]) -> str:
    """SHA-256 of what is trained: tokens, streams, labels and the trees' order; not of where it came from.

    Rollouts count as a partition of the rows, because a row without a rollout id is named after its file and line.
    """
    unhashed = {*NOT_HASHED, *(() if has_images(table) else ("images",))}
    columns = [name for name in SCHEMA.names if name not in unhashed or name == "source"]
    digest = hashlib.sha256(json.dumps([columns, len(table), len(names)]).encode())
    for field in SCHEMA:
        if field.name in unhashed:
            continue
        digest.update(field.name.encode())
        chunks = table.column(field.name).chunks  # lists stay in their chunks: a mapped file may exceed the memory
        if field.name == "rollout":
            digest.update(_rollout_indices(table).tobytes())
            continue
        digest.update(np.asarray(table.column(field.name).is_valid().to_numpy()).tobytes())
        if pa.types.is_large_list(field.type):
            for chunk in chunks:
                digest.update(np.diff(np.asarray(chunk.offsets)).tobytes())
            for chunk in chunks:
                digest.update(np.ascontiguousarray(chunk.flatten().to_numpy(zero_copy_only=False)).data)
        elif pa.types.is_string(field.type):
            digest.update(json.dumps(table.column(field.name).to_pylist()).encode())
        else:
            zero = False if pa.types.is_boolean(field.type) else 0
            digest.update(_whole(table.column(field.name)).fill_null(zero).to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def has_images(table: pa.Table) -> bool:
    """Whether a row holds an image."""
    column = table.column("images")
    return bool(column.null_count < len(column))


def _as_json(values: list[Any]) -> str | None:
    """JSON text; None for an empty list."""
    return json.dumps(values) if values else None


def _rollout_indices(table: pa.Table) -> np.ndarray:
    """[rows] int64, the rollout of each row in order of first appearance; -1 for a row without one."""
    seen: dict[tuple[str | None, str], int] = {}
    keys = zip(table.column("group").to_pylist(), table.column("rollout").to_pylist(), strict=True)
    indices = [-1 if name is None else seen.setdefault((group, name), len(seen)) for group, name in keys]
    return np.array(indices, dtype=np.int64)


def first_id_outside(table: pa.Table, vocab_size: int) -> tuple[int, int, int] | None:
    """(row, position in its trajectory, token id) of the first id that is not in the vocabulary."""
    start = 0
    for chunk in table.column("token_ids").chunks:
        ids = chunk.flatten().to_numpy(zero_copy_only=False)
        bad = np.flatnonzero(ids >= vocab_size)
        if len(bad):
            offsets = np.asarray(chunk.offsets)
            row = int(np.searchsorted(offsets - offsets[0], bad[0], side="right")) - 1
            position = int(bad[0] - (offsets[row] - offsets[0])) + table.column("shared")[start + row].as_py()
            return start + row, position, int(ids[bad[0]])
        start += len(chunk)
    return None


def _list_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    lengths = np.array([0 if value is None else len(value) for value in values], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    kinds = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float32(): np.float32}
    item = kinds[kind.value_type]
    parts = [np.asarray(value, dtype=item) for value in values if value is not None and len(value)]
    flat = np.concatenate(parts) if parts else np.zeros(0, dtype=item)
    absent = np.array([value is None for value in values], dtype=bool)
    try:
        return pa.LargeListArray.from_arrays(
            pa.array(offsets),
            pa.array(flat, kind.value_type),
            type=kind,
            mask=pa.array(absent) if len(values) else None,
        )
    except pa.ArrowException as error:
        raise DataError(f"rows cannot be stored: {error}.") from error


def _whole(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        return whole.chunk(0) if whole.num_chunks else pa.array([], column.type)
    return whole


def _views(column: pa.ChunkedArray) -> list[np.ndarray | None]:
    whole = _whole(column)
    values = whole.values.to_numpy(zero_copy_only=False)
    offsets = np.asarray(whole.offsets)
    valid = whole.is_valid().to_pylist()
    return [values[offsets[i] : offsets[i + 1]] if ok else None for i, ok in enumerate(valid)]
