"""Loading: files to training trees, through the cache and the workers, with nothing dropped silently."""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import pyarrow as pa

from treewise.data import cache, workers
from treewise.data.dataset import TreeDataset
from treewise.data.declared_nodes import PlacedNode
from treewise.data.images import ImageReader
from treewise.data.io.files import PathLike
from treewise.data.io.options import LoadReport, RenderOptions
from treewise.data.io.printable import printable, shown
from treewise.data.io.row_store import RowStore
from treewise.data.io.rows import RecordResult, Row
from treewise.data.io.table import content_hash, has_images
from treewise.data.records import RecordReader
from treewise.data.render.tools import find_tools
from treewise.data.selection import Trees, mix
from treewise.data.sources import Source, open_sources
from treewise.data.sources.foreign import read_sources
from treewise.errors import ConfigError, DataError, num

MAX_WARNINGS = 1000
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
MIXTURE_KEYS = {"data", "path", "weight"}


def load_trees(
    data: Any,
    tokenizer: Any = None,
    *,
    options: RenderOptions | Mapping[str, Any] | None = None,
    num_workers: int | None = None,
    progress: bool = False,
    cache_dir: PathLike | None = None,
    on_bad_record: Literal["error", "quarantine"] = "error",
    quarantine_path: PathLike | None = None,
    allow_partial_tail: bool = False,
    read_only: bool = False,
) -> Trees:
    """Reads records of any form (`treewise.data.io.record_forms`) from any source, and groups them into training trees.

    Parameters:
        data: `.jsonl`, `.jsonl.gz`, `.json`, `.parquet`, `.arrow` files, folders or globs of them; a folder that
            `save_to_disk` wrote (`folder[split]`); `hf:org/name[split]`; a `datasets.Dataset` or `IterableDataset`; a
            pandas data frame; a list or iterator of mappings; a list of several of these, which groups may reach over.
            A list of `{"data": ..., "weight": 2}` is a mixture (see `treewise.data.selection.mix`).
        tokenizer: a transformers tokenizer or the path of one; needed by records that hold text. For images
            the model's processor, or the path of one.
        options: how records are rendered and grouped; a mapping is taken as `RenderOptions(**options)`.
        num_workers: processes; 0 for none, by default all cores where the data is large enough.
        progress: show a progress bar, where there is a terminal or a notebook.
        cache_dir: folder of rendered data; by default `$TREEWISE_CACHE`, then `~/.cache/treewise`. Loads without a
            tokenizer, loads that left records out, and those of objects without a fingerprint are not cached.
        on_bad_record: stop at the first bad record, or write bad ones to `quarantine_path` and go on.
        quarantine_path: by default `quarantine.jsonl` in the working folder; written anew by each load.
        allow_partial_tail: leave out a last line that was cut off while it was written.
        read_only: write no file: the cache is read but not written, and bad records are counted only.

    Raises:
        DataError: a bad file or record, at `file:line`; no record at all.
        ConfigError: bad options, or a tokenizer that cannot be loaded.
    """
    options = RenderOptions.from_dict(options) if isinstance(options, Mapping) else options or RenderOptions()
    if on_bad_record not in ("error", "quarantine"):
        raise ConfigError(f"on_bad_record is {on_bad_record!r}; choose 'error' or 'quarantine'.")
    tokenizer = _tokenizer(tokenizer)
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    quarantine = Path(os.devnull if read_only else quarantine_path or "quarantine.jsonl")
    load = _Load(
        *(tokenizer, options, num_workers, progress, cache_dir),
        *(on_bad_record, quarantine, allow_partial_tail, read_only, processor),
    )
    parts = _mixture(data)
    if parts is None:
        return load.run(open_sources(data, options.max_record_bytes))
    if on_bad_record == "quarantine":
        raise ConfigError("a mixture takes no on_bad_record='quarantine'; load its parts first, then mix them.")
    return mix(
        [load.run(open_sources(part, options.max_record_bytes)) for part, _ in parts], [weight for _, weight in parts]
    )


def _mixture(data: Any) -> list[tuple[Any, float]] | None:
    """The parts of a mixture and their weights; None for data that is no mixture.

    Raises:
        DataError: a part without data, or one beside something else.
    """
    items = list(data) if isinstance(data, list | tuple) else [data]
    is_part = [isinstance(item, Mapping) and set(item) <= MIXTURE_KEYS and "weight" in item for item in items]
    if not any(is_part):
        return None
    parts = []
    for index, item in enumerate(items):
        if not is_part[index]:
            parts.append((item, 1.0))
            continue
        name = "data" if "data" in item else "path"
        if set(item) != {name, "weight"}:
            raise DataError(f"data[{index}] of a mixture is {shown(item)}; give {{data: ..., weight: ...}}.")
        parts.append((item[name], item["weight"]))
    return parts


@dataclass(frozen=True, slots=True)
class _Load:
    """The settings of a load."""

    tokenizer: Any
    options: RenderOptions
    num_workers: int | None
    progress: bool
    cache_dir: PathLike | None
    on_bad_record: str
    quarantine: Path
    allow_partial_tail: bool
    read_only: bool
    processor: Any = None

    def run(self, sources: Sequence[Source]) -> TreeDataset:
        """The trees of all sources."""
        warnings: list[str] = []
        entry = None
        merge = self.options.merge_siblings
        folder = cache.cache_folder(self.cache_dir)
        if self.tokenizer is not None:
            key = cache.cache_key(sources, self.options, self.tokenizer, self.allow_partial_tail)
            entry = None if key is None else folder / f"{key}.parquet"
            stored = None if entry is None else _read_cache(entry, warnings)
            if stored is not None:
                table, facts = stored
                return TreeDataset(table, facts, LoadReport(**facts["report"]), merge)
        images = self._image_reader(folder)
        reader = RecordReader(self.tokenizer, self.options, images)
        builder = _Builder(reader, self.on_bad_record, self.allow_partial_tail, self.quarantine, RowStore(folder))
        processes = workers.choose_num_workers(self.num_workers, sum(source.num_bytes for source in sources))
        with builder, _bar(self.progress) as advance:
            jobs = read_sources(sources, builder.report)
            for num_bytes, results in workers.read_all(jobs, reader, processes):
                for result in results:
                    builder.add(result)
                advance(num_bytes, len(results))
            builder.finish_node_trees()
            table, facts, report = builder.result(len(sources))
        # An image's file may change without the record, so records with images are read each time.
        if entry is not None and not report.dropped and not self.read_only and not has_images(table):
            path = entry.with_suffix(cache.MAPPED) if builder.store.is_mapped else entry
            _write_cache(path, table, facts, report, warnings)
        report.warnings += warnings
        return TreeDataset(table, facts, report, merge)

    def _image_reader(self, folder: Path) -> ImageReader | None:
        """Images that come as bytes are kept in the cache, or until the process ends."""
        if self.processor is None:
            return None
        images = folder / "images"
        if self.read_only:
            images = Path(tempfile.mkdtemp(prefix="treewise-images-"))
            atexit.register(shutil.rmtree, images, ignore_errors=True)
        return ImageReader(self.processor, images, from_network=self.options.images_from_network)


@dataclass(slots=True)
class _Tree:
    name: str
    index: int
    num_records: int = 0
    num_rows: int = 0


class _Builder:
    """Collects results in order into trees, and bad records into the quarantine."""

    def __init__(
        self, reader: RecordReader, on_bad_record: str, allow_partial_tail: bool, quarantine: Path, store: RowStore
    ) -> None:
        self.reader = reader
        self.store = store
        self.num_trajectories = 0
        self.quarantines = on_bad_record == "quarantine"
        self.allow_partial_tail = allow_partial_tail
        self.quarantine_path = quarantine
        self.stream: TextIO | None = None
        self.trees: list[_Tree] = []
        self.by_key: dict[str, _Tree] = {}
        self.by_rollout: dict[str, tuple[str, Any]] = {}
        self.node_trees: dict[tuple[str, str], tuple[_Tree, list[PlacedNode]]] = {}
        self.report = LoadReport()
        self.warnings: dict[str, None] = {}

    def __enter__(self) -> "_Builder":
        if self.quarantines:
            try:
                self.stream = self.quarantine_path.open("w", encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"quarantine_path {self.quarantine_path} cannot be written ({error.strerror})."
                ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
        if self.stream is not None:
            self.stream.close()

    def add(self, result: RecordResult) -> None:
        """Takes the next result in order."""
        self.report.num_records += 1
        self.warnings.update(dict.fromkeys([*result.warnings, *result.drift]))
        for key in result.unused_keys:
            self.report.unused_keys[key] = self.report.unused_keys.get(key, 0) + 1
        self.report.num_compared += result.is_compared
        self.report.num_preferences += result.is_preference
        self.report.num_drifted += bool(result.drift)
        self._keep_rollout_together(result)
        if result.error is not None:
            self._drop(result)
        elif result.node is not None:
            self._add_node(result)
        else:
            tree = self.by_key.get(result.key) if result.key is not None else None
            if tree is None:
                tree = self._new_tree(result.name)
                if result.key is not None:
                    self.by_key[result.key] = tree
            self._add_rows(tree, result.rows)
            tree.num_records += 1

    def _new_tree(self, name: str) -> _Tree:
        tree = _Tree(name, len(self.trees))
        self.trees.append(tree)
        return tree

    def _add_rows(self, tree: _Tree, rows: list[Row]) -> None:
        tree.num_rows += len(rows)
        self.num_trajectories += sum(row.parent is None or bool(row.is_end) for row in rows)
        self.store.add(tree.index, rows)

    def _keep_rollout_together(self, result: RecordResult) -> None:
        """Rows of one rollout that name no group have different prompts: that of the first is the rollout's."""
        if not result.is_grouped_by_prompt or result.rollout is None:
            return
        name = json.dumps(result.rollout)
        first = (result.key or json.dumps(["rollout", result.rollout]), result.rows[0].group)
        result.key, group = self.by_rollout.setdefault(name, first)
        for row in result.rows:
            row.group = group

    def finish_node_trees(self) -> None:
        """Builds the trees that were given one node per line."""
        for (file, name), (tree, placed) in self.node_trees.items():
            try:
                tools = find_tools(placed[0].value, Path(file), placed[0].location)
                _, rows = self.reader.declared_rows(placed, tools, Path(file))
            except DataError as error:
                text = json.dumps([node.value for node in placed], default=str)
                self._drop(RecordResult(f"{file}: tree {name}", error=str(error), raw=text))
            else:
                self._add_rows(tree, rows)
                tree.num_records = len(placed)

    def result(self, num_sources: int) -> tuple[pa.Table, dict[str, Any], LoadReport]:
        """The table, what belongs to it, and the report."""
        report = self.report
        trees = [tree for tree in self.trees if tree.num_rows]
        if not trees:
            reason = (
                f" ({len(report.dropped)} were left out; the first: {report.dropped[0][1]})" if report.dropped else ""
            )
            raise DataError(f"no record to train on in {num(num_sources, 'file')}{reason}.")
        index_of_tree = np.full(len(self.trees), -1)
        index_of_tree[[tree.index for tree in trees]] = np.arange(len(trees))
        table = self.store.finish(index_of_tree)
        names = [tree.name for tree in trees]
        facts = {
            "names": names,
            "num_records": [tree.num_records for tree in trees],
            "fingerprint": content_hash(table, names),
        }
        report.num_files, report.num_trees = num_sources, len(trees)
        report.num_trajectories = self.num_trajectories
        report.warnings += list(self.warnings)[:MAX_WARNINGS]
        if len(self.warnings) > MAX_WARNINGS:
            report.warnings.append(f"{len(self.warnings) - MAX_WARNINGS} more warnings")
        return table, facts, report

    def _add_node(self, result: RecordResult) -> None:
        assert result.node is not None
        file, _, _ = result.location.rpartition(":")
        name, node = result.node
        if (file, name) not in self.node_trees:
            tree = self._new_tree(printable(json.loads(name)))
            self.node_trees[file, name] = (tree, [])
        self.node_trees[file, name][1].append(PlacedNode(result.location, node))

    def _drop(self, result: RecordResult) -> None:
        assert result.error is not None
        partial = result.is_partial_tail and self.allow_partial_tail
        if not partial and not self.quarantines:
            raise DataError(result.error)
        self.report.dropped.append((result.location, result.error))
        if self.stream is not None:
            line = {"location": result.location, "reason": result.error, "record": result.raw}
            self.stream.write(json.dumps(line) + "\n")


def _tokenizer(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    from transformers import AutoProcessor, AutoTokenizer

    has_processor = any((Path(tokenizer) / name).is_file() for name in PROCESSOR_FILES)
    try:
        return (AutoProcessor if has_processor else AutoTokenizer).from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"tokenizer {str(tokenizer)!r} cannot be loaded: {reason}") from error


def _read_cache(entry: Path, warnings: list[str]) -> tuple[pa.Table, dict[str, Any]] | None:
    try:
        return cache.read_entry(entry) or cache.read_entry(entry.with_suffix(cache.MAPPED))
    except DataError as error:
        warnings.append(f"{error}; it was rendered again.")
        return None


def _write_cache(entry: Path, table: pa.Table, facts: dict[str, Any], report: LoadReport, warnings: list[str]) -> None:
    stored = {
        "num_files": report.num_files,
        "num_records": report.num_records,
        "num_trees": report.num_trees,
        "num_trajectories": report.num_trajectories,
        "num_compared": report.num_compared,
        "num_drifted": report.num_drifted,
        "unused_keys": report.unused_keys,
        "num_preferences": report.num_preferences,
        "warnings": report.warnings,
    }
    try:
        cache.write_entry(entry, table, {**facts, "report": stored})
    except OSError as error:
        warnings.append(f"{entry}: the cache could not be written ({error.strerror}); the next load renders again.")


def _bar(progress: bool) -> Any:
    """A context that gives `advance(num_bytes, num_records)`. A log file gets no bar."""
    if progress:
        from rich.console import Console

        console = Console(stderr=True)
        if console.is_terminal or console.is_jupyter:
            return _RichBar(console)
    return nullcontext(_no_bar)


def _no_bar(*_: int) -> None: ...


class _RichBar:
    """Records and bytes read so far; the total of compressed files is not known beforehand."""

    def __init__(self, console: Any) -> None:
        self.console = console

    def __enter__(self) -> Any:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = [SpinnerColumn(), TextColumn("reading {task.completed} records, {task.fields[megabytes]:.1f} MB")]
        self.bar = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True)
        self.bar.start()
        self.task = self.bar.add_task("records", total=None, megabytes=0.0)
        self.num_bytes = 0
        return self.advance

    def advance(self, num_bytes: int, num_records: int) -> None:
        """Shows further records, and the bytes that they took."""
        self.num_bytes += num_bytes
        self.bar.update(self.task, advance=num_records, megabytes=self.num_bytes / 1e6)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
