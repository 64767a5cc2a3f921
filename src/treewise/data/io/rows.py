"""Rows: trajectories and declared nodes as workers hand them over, as the Arrow table that a dataset holds, and on
disk: rendered data by content hash, rendered once; and the rows of one load that exceed the memory.

Calls of one record share almost all of their prompts, so a row stores only what differs from the row before it in the
same record (`shared` tokens are taken from there); weights of rendered rows are a few spans.

An entry of the cache is one Parquet file (a memory-mapped Arrow file where the rows exceed what is held in memory),
never a pickle. It is written beside its place and moved there, so a killed process leaves nothing half-written. Its
name ends in a hash of its bytes, which is verified before they are read, and a damaged entry is rendered again.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import treewise
from treewise.base.arrays import Ints
from treewise.base.durable import moved_into_place
from treewise.base.paths import path_of
from treewise.errors import DataError
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import STREAMS, Stream, Trajectory

IDS, FLOATS, ROUTES = (pa.large_list(kind) for kind in (pa.int32(), pa.float32(), pa.int16()))


def _column_of(stream: Stream) -> pa.DataType:
    """The type of a stream's values, one after the other."""
    return ROUTES if stream.is_routes else IDS if np.issubdtype(stream.dtype, np.integer) else FLOATS


SCHEMA = pa.schema(
    {
        "tree": pa.int32(),
        "shared": pa.int64(),
        "token_ids": IDS,
        "spans": pa.large_list(pa.int64()),
        "span_weights": FLOATS,
        **{name: _column_of(stream) for name, stream in STREAMS.items()},
        "num_routers": pa.int32(),
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
ROUTED = {name for name, stream in STREAMS.items() if stream.is_routes}
LATER = (
    "policy_versions",
    "routed_experts",
    "token_rewards",
    "num_routers",
)  # rows from before there were any keep their hash
NOT_HASHED = ("source", "image_sources")  # where it came from
LABELS = ("group", "rollout")  # stored as JSON: text and numbers stay apart


@dataclass(slots=True)
class Row:
    """One trajectory, or one declared node where `parent` is given.

    `token_ids` are the tokens after the first `shared` tokens of the row before. `streams` hold the values of the whole
    trajectory, those with several values per token flat; of `routed_experts` in `num_routers` layers. Without
    `loss_weights` among them, `spans` ([start, end, start, end, ...]) are the trained tokens, each span with its weight
    in `span_weights`. `images` are those of the whole trajectory.
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
    num_routers: int | None = None

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
    dates: list[str] = field(default_factory=list)  # that the chat template wrote as today's
    warnings: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)  # what was mended or left out of it, how often
    unused_keys: list[str] = field(default_factory=list)
    rollout: str | int | float | None = None  # as the record gives it
    is_grouped_by_prompt: bool = False  # no group was given, so equal prompts make one
    is_preference: bool = False  # holds completions that are not to be imitated
    is_compared: bool = False  # has both token ids and text
    drift: list[str] = field(default_factory=list)  # where these differ
    is_sample: bool = False  # of a row of several, but the first
    left_out: list[tuple[str, str]] = field(default_factory=list)  # replies that cannot be trained, and why
    error: str | None = None
    is_partial_tail: bool = False
    raw: str | None = None  # the record as text, kept where it is bad

    def belongs_to(self, group: str | int | float | None, name: str) -> None:
        """Puts the rows in the tree of a group; those of None are a tree of their own. name: of the tree."""
        self.key, self.name = None if group is None else json.dumps(group), name


def row_from_trajectory(trajectory: Trajectory) -> Row:
    """A row that holds all streams of a validated trajectory."""
    streams = {name: value.reshape(-1) for name, value in trajectory.streams.items()}
    names = ("token_ids", "group", "reward", "rollout", "source", "images")
    num_routers = None if trajectory.routed_experts is None else trajectory.routed_experts.shape[1]
    return Row(streams=streams, num_routers=num_routers, **{name: getattr(trajectory, name) for name in names})


def rows_to_table(trees: Iterable[int], rows: Sequence[Row]) -> pa.Table:
    """A table with one line per row; `trees` gives the tree of each."""
    columns: dict[str, Any] = {name: [getattr(row, name, None) for row in rows] for name in SCHEMA.names}
    columns["tree"] = list(trees)
    columns |= {name: [row.streams.get(name) for row in rows] for name in STREAMS}
    columns |= {name: [None if v is None else json.dumps(v) for v in columns[name]] for name in LABELS}
    spans = [[(image.start, image.end, image.digest) for image in row.images] for row in rows]
    columns["images"] = [json.dumps(span) if span else None for span in spans]
    columns["image_sources"] = [json.dumps([i.source for i in row.images]) if row.images else None for row in rows]
    return pa.table({item.name: pa.array(columns[item.name], item.type) for item in SCHEMA}, schema=SCHEMA)


def table_columns(part: pa.Table) -> dict[str, list[Any]]:
    """The columns of some rows as rows have them: streams as one mapping for each; arrays are views of the table."""
    columns = {item.name: column_values(part.column(item.name).combine_chunks()) for item in SCHEMA}
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
    sizes: Iterator[tuple[int, np.ndarray, int]]
    sizes = zip(columns["shared"], columns["token_ids"], columns.pop("num_routers"), strict=True)
    made: list[dict[str, np.ndarray]] = columns["streams"]
    for own, (shared, ids, num_routers) in zip(made, sizes, strict=True):
        for name in own.keys() & ROUTED:
            own[name] = own[name].reshape(shared + len(ids), num_routers, -1)
    return columns


def trajectories_of(columns: dict[str, list[Any]]) -> list[Trajectory]:
    """Trajectories of rows in order; each `shared` prefix comes from the row before."""
    result: list[Trajectory] = []
    own_ids: list[np.ndarray] = columns["token_ids"]
    streams_of: list[dict[str, np.ndarray]] = columns["streams"]
    shared_of: list[int] = columns["shared"]
    for i, (ids, shared) in enumerate(zip(own_ids, shared_of, strict=True)):
        if shared:
            ids = np.concatenate([result[-1].token_ids[:shared], ids])
        streams: dict[str, Any] = {
            name: values.reshape(len(ids), -1) if STREAMS[name].has_candidates else values
            for name, values in streams_of[i].items()
        }
        spans: list[int] = columns["spans"][i]
        if len(spans):
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
    unhashed |= {name for name in LATER if table.column(name).null_count == len(table)}
    columns = [name for name in SCHEMA.names if name not in unhashed or name == "source"]
    digest = hashlib.sha256(json.dumps([columns, len(table), len(names)]).encode())
    for item in SCHEMA:
        if item.name in unhashed:
            continue
        digest.update(item.name.encode())
        column = table.column(item.name)
        if item.name == "rollout":
            seen: dict[tuple[str | None, str], int] = {}  # in order of first appearance; -1 for a row without one
            keys = zip(table.column("group").to_pylist(), column.to_pylist(), strict=True)
            indices = [-1 if name is None else seen.setdefault((group, name), len(seen)) for group, name in keys]
            digest.update(np.array(indices, dtype=np.int64).tobytes())
            continue
        digest.update(np.asarray(column.is_valid().to_numpy()).tobytes())
        if pa.types.is_large_list(item.type):  # stays in its chunks: a mapped file may exceed the memory
            for offsets in (chunk.offsets for chunk in _lists(column)):
                digest.update(np.diff(np.asarray(offsets)).tobytes())
            for values in (chunk.flatten() for chunk in _lists(column)):
                digest.update(np.ascontiguousarray(values.to_numpy(zero_copy_only=False)).data)
        elif pa.types.is_string(item.type):
            digest.update(json.dumps(column.to_pylist()).encode())
        else:
            zero = False if pa.types.is_boolean(item.type) else 0
            digest.update(column.combine_chunks().fill_null(zero).to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def has_images(table: pa.Table) -> bool:
    """Whether a row holds an image."""
    column = table.column("images")
    return bool(column.null_count < len(column))


def first_id_outside(table: pa.Table, vocab_size: int) -> tuple[int, int, int] | None:
    """(row, position in its trajectory, token id) of the first id that is not in the vocabulary."""
    start = 0
    for chunk in _lists(table.column("token_ids")):
        ids: Ints = chunk.flatten().to_numpy(zero_copy_only=False)
        bad = np.flatnonzero(ids >= vocab_size)
        if len(bad):
            first = int(bad[0])
            offsets: list[int] = (np.asarray(chunk.offsets) - int(chunk.offsets[0].as_py())).tolist()
            row = bisect_right(offsets, first) - 1
            shared: int = table.column("shared")[start + row].as_py()
            return start + row, first - offsets[row] + shared, int(ids[first])
        start += len(chunk)
    return None


def column_values(column: pa.Array) -> list[Any]:
    """Python values of a column; lists of numbers stay NumPy arrays, which is most of the work saved."""
    lists = column if isinstance(column, pa.ListArray | pa.LargeListArray) else None
    kind = pa.null() if lists is None else lists.values.type
    if lists is None or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)) or lists.values.null_count:
        return column.to_pylist()
    values = lists.values.to_numpy(zero_copy_only=False)
    offsets = np.asarray(lists.offsets)
    valid = column.is_valid().to_pylist()
    return [values[offsets[i] : offsets[i + 1]] if ok else None for i, ok in enumerate(valid)]


def _lists(column: pa.ChunkedArray) -> list[pa.LargeListArray]:
    return cast("list[pa.LargeListArray]", column.chunks)


# -- rows on disk ------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

READING = 4  # raised where a record is read as other rows than before: tests/data/io/test_rows.py says when
ENTRY_FIELD = b"treewise"
HASH_LENGTH = 32  # of an entry's bytes, in its name
READ_BYTES = 1 << 20
MAPPED = ".arrow"  # suffix of entries that are memory-mapped
MAX_MEMORY_BYTES = 1 << 30  # of rendered rows; beyond, they go to a file
FLUSH_BYTES = 1 << 25


def cache_folder(folder: str | Path | None) -> Path:
    """The folder of the cache: as given, `$TREEWISE_CACHE`, or `~/.cache/treewise`."""
    return path_of(folder or os.environ.get("TREEWISE_CACHE") or "~/.cache/treewise")


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
    vocabulary: dict[str, int] = tokenizer.get_vocab() if backend is None else {}
    rules: str = json.dumps(sorted(vocabulary.items())) if backend is None else backend.to_str()
    decoder: dict[int, object] = tokenizer.added_tokens_decoder
    added = sorted((i, str(t)) for i, t in decoder.items())
    rest = [type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map, added]
    return hashlib.sha256((rules + json.dumps(rest, default=str, sort_keys=True)).encode()).hexdigest()


def write_entry(path: Path, table: pa.Table, facts: dict[str, Any]) -> None:
    """Writes an entry, whose name is `path` and a hash of its bytes, in place of others of that path. `facts` are plain
    JSON values that belong to it.
    """
    stored = table.replace_schema_metadata({ENTRY_FIELD: json.dumps(facts).encode()})
    with moved_into_place(path, lambda part: path.with_stem(f"{path.stem}-{_hash_of(part)}"), is_durable=False) as part:
        if path.suffix != MAPPED:
            pq.write_table(stored, part, compression="zstd")
        else:
            with pa.ipc.new_file(str(part), stored.schema) as writer:
                writer.write_table(stored)
        for old in _entries(path):
            with contextlib.suppress(OSError):
                old.unlink()


def read_entry(path: Path) -> tuple[pa.Table, dict[str, Any]] | None:
    """An entry whose bytes are those that were written, or None where there is none. Damaged bytes are not given to
    Arrow, which may end the process for them.

    Raises:
        DataError: a damaged entry.
    """
    for entry in _entries(path)[:1]:
        try:
            if _hash_of(entry) != entry.stem.rpartition("-")[2]:
                raise DataError(f"{entry}: damaged cache entry (its content hash differs)")
        except OSError as error:
            raise DataError(f"{entry}: the cache entry cannot be read ({error.strerror})") from None
        if entry.suffix == MAPPED:
            table = pa.ipc.open_file(pa.memory_map(str(entry))).read_all()
        else:
            with pq.ParquetFile(entry, memory_map=False) as file:
                table = file.read()  # `read_table` would import pandas
        return table, json.loads(table.schema.metadata[ENTRY_FIELD])
    return None


def _entries(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}-*{path.suffix}"))


def _hash_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:HASH_LENGTH]


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
        self._writer: pa.ipc.RecordBatchFileWriter | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether the rows went to a file."""
        return self._writer is not None

    def add(self, tree: int, rows: list[Row]) -> None:
        """Rows of a tree, after those that it has already. Raises `DataError` where a file cannot be written."""
        self._trees += [tree] * len(rows)
        self._rows += rows
        self._num_bytes += sum(stream.nbytes for row in rows for stream in (row.token_ids, *row.streams.values()))
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
        assert self._path is not None
        assert self._writer is not None
        self._writer.close()
        table = pa.ipc.open_file(pa.memory_map(self._path)).read_all()
        trees = index_of_tree[table.column("tree").to_numpy()].astype(np.int32)
        return table.set_column(0, SCHEMA.field("tree"), pa.array(trees))

    def close(self) -> None:
        """Removes the file's name. What maps it goes on to see it."""
        if self._path is not None and self._writer is not None:
            self._writer.close()
            with contextlib.suppress(PermissionError):  # Windows keeps files that are mapped
                Path(self._path).unlink(missing_ok=True)

    def _flush(self) -> None:
        table = rows_to_table(self._trees, self._rows)
        try:
            if self._writer is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                handle, self._path = tempfile.mkstemp(dir=self._folder, prefix=".rows-", suffix=MAPPED)
                os.close(handle)
                self._writer = pa.ipc.new_file(self._path, SCHEMA)
            self._writer.write_table(table)
        except OSError as error:
            raise DataError(
                f"{self._folder}: rendered rows cannot be written ({error.strerror or error}); name a folder with room "
                "by TREEWISE_CACHE, or cache_dir=."
            ) from error
        self._trees, self._rows, self._num_bytes = [], [], 0
