"""Rows: trajectories and declared nodes as workers hand them over, as the Arrow table that a dataset holds and the
cache stores, and read back from it; and the content hash of that table.

Calls of one record share almost all of their prompts, so a row stores only what differs from the row before it in the
same record (`shared` tokens are taken from there); weights of rendered rows are a few spans.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import STREAMS, Trajectory

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


@dataclass(slots=True)
class Row:
    """One trajectory, or one declared node where `parent` is given.

    `token_ids` are the tokens after the first `shared` tokens of the row before. `streams` hold the values of the whole
    trajectory, those with k candidates per token flat. Without `loss_weights` among them, `spans` ([start, end, start,
    end, ...]) are the trained tokens, each span with its weight in `span_weights`. `images` are those of the whole
    trajectory.
    """

    token_ids: np.ndarray
    shared: int = 0
    spans: list[int] = field(default_factory=list)
    span_weights: list[float] = field(default_factory=list)
    streams: dict[str, np.ndarray] = field(default_factory=dict)
    group: str | int | float | None = None
    reward: float | None = None
    rollout: str | int | float | None = None
    source: str = ""
    parent: int | None = None
    is_end: bool | None = None
    images: tuple[ImageSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the whole trajectory."""
        return self.shared + len(self.token_ids)


@dataclass(slots=True)
class RecordResult:
    """The result of one record: rows of a tree, a node of a tree given line by line, or an error."""

    location: str
    rows: list[Row] = field(default_factory=list)
    key: str | None = None  # records with equal keys form one training tree
    name: str = ""
    is_declared: bool = False
    node: tuple[str, dict[str, Any]] | None = None  # (tree, node): one node per line
    warnings: list[str] = field(default_factory=list)
    unused_keys: list[str] = field(default_factory=list)
    rollout: str | int | float | None = None  # as the record gives it
    is_grouped_by_prompt: bool = False  # no group was given, so equal prompts make one
    is_preference: bool = False  # holds completions that are not to be imitated
    is_compared: bool = False  # has both token ids and text
    drift: list[str] = field(default_factory=list)  # where these differ
    error: str | None = None
    is_partial_tail: bool = False
    raw: str | None = None  # the record as text, kept where it is bad


def row_from_trajectory(trajectory: Trajectory) -> Row:
    """A row that holds all streams of a validated trajectory."""
    streams = {name: value.reshape(-1) for name, value in trajectory.streams.items()}
    names = ("token_ids", "group", "reward", "rollout", "source", "images")
    return Row(streams=streams, **{name: getattr(trajectory, name) for name in names})


def rows_to_table(trees: Iterable[int], rows: Sequence[Row]) -> pa.Table:
    """A table with one line per row; `trees` gives the tree of each."""
    columns: dict[str, Any] = {name: [getattr(row, name, None) for row in rows] for name in SCHEMA.names}
    columns["tree"] = list(trees)
    columns |= {name: [row.streams.get(name) for row in rows] for name in STREAMS}
    columns |= {name: [None if v is None else json.dumps(v) for v in columns[name]] for name in LABELS}
    spans = [[(each.start, each.end, each.digest) for each in row.images] for row in rows]
    columns["images"] = [json.dumps(each) if each else None for each in spans]
    columns["image_sources"] = [json.dumps([i.source for i in row.images]) if row.images else None for row in rows]
    return pa.table({item.name: pa.array(columns[item.name], item.type) for item in SCHEMA}, schema=SCHEMA)


def table_columns(part: pa.Table) -> dict[str, list[Any]]:
    """The columns of some rows as rows have them: streams as one mapping for each; arrays are views of the table."""
    columns: dict[str, list[Any]] = {
        item.name: _views(part.column(item.name))
        if pa.types.is_large_list(item.type)
        else part.column(item.name).to_pylist()
        for item in SCHEMA
    }
    for name in LABELS:
        columns[name] = [None if value is None else json.loads(value) for value in columns[name]]
    images = [[json.loads(value or "[]") for value in columns.pop(name)] for name in ("image_sources", "images")]
    columns["images"] = [
        tuple(ImageSpan(source, *span) for source, span in zip(*each, strict=True))
        for each in zip(*images, strict=True)
    ]
    streams = {name: columns.pop(name) for name in STREAMS}
    columns["streams"] = [
        {name: values[i] for name, values in streams.items() if values[i] is not None} for i in range(len(part))
    ]
    return columns


def trajectories_of(columns: dict[str, list[Any]]) -> list[Trajectory]:
    """Trajectories of rows in order; each `shared` prefix comes from the row before."""
    result: list[Trajectory] = []
    for i, ids in enumerate(columns["token_ids"]):
        if shared := columns["shared"][i]:
            ids = np.concatenate([result[-1].token_ids[:shared], ids])
        streams = {
            name: values.reshape(len(ids), -1) if STREAMS[name].has_candidates else values
            for name, values in columns["streams"][i].items()
        }
        if len(spans := columns["spans"][i]):
            weights = streams["loss_weights"] = np.zeros(len(ids), dtype=np.float32)
            for start, end, weight in zip(spans[::2], spans[1::2], columns["span_weights"][i], strict=True):
                weights[start:end] = weight
        labels = {name: columns[name][i] for name in ("group", "reward", "rollout", "source", "images")}
        result.append(Trajectory(ids, **streams, **labels))
    return result


def content_hash(table: pa.Table, names: Sequence[str]) -> str:
    """SHA-256 of what is trained: tokens, streams, labels and the trees' order; not of where it came from.

    Rollouts count as a partition of the rows, because a row without a rollout id is named after its file and line.
    """
    unhashed = {*NOT_HASHED, *(() if has_images(table) else ("images",))}
    if table.column("policy_versions").null_count == len(table):  # rows from before there were any keep their hash
        unhashed.add("policy_versions")
    columns = [name for name in SCHEMA.names if name not in unhashed or name == "source"]
    digest = hashlib.sha256(json.dumps([columns, len(table), len(names)]).encode())
    for item in SCHEMA:
        if item.name in unhashed:
            continue
        digest.update(item.name.encode())
        column = table.column(item.name)
        if item.name == "rollout":
            digest.update(_rollout_indices(table).tobytes())
            continue
        digest.update(np.asarray(column.is_valid().to_numpy()).tobytes())
        if pa.types.is_large_list(item.type):  # stays in its chunks: a mapped file may exceed the memory
            for chunk in column.chunks:
                digest.update(np.diff(np.asarray(chunk.offsets)).tobytes())
            for chunk in column.chunks:
                digest.update(np.ascontiguousarray(chunk.flatten().to_numpy(zero_copy_only=False)).data)
        elif pa.types.is_string(item.type):
            digest.update(json.dumps(column.to_pylist()).encode())
        else:
            zero = False if pa.types.is_boolean(item.type) else 0
            digest.update(_whole(column).fill_null(zero).to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def has_images(table: pa.Table) -> bool:
    """Whether a row holds an image."""
    column = table.column("images")
    return bool(column.null_count < len(column))


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


def _rollout_indices(table: pa.Table) -> np.ndarray:
    """[rows] int64, the rollout of each row in order of first appearance; -1 for a row without one."""
    seen: dict[tuple[str | None, str], int] = {}
    keys = zip(table.column("group").to_pylist(), table.column("rollout").to_pylist(), strict=True)
    indices = [-1 if name is None else seen.setdefault((group, name), len(seen)) for group, name in keys]
    return np.array(indices, dtype=np.int64)


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
