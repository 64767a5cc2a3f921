"""Loading: files to training trees, through the cache and the workers, with nothing dropped silently."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from treewise.data import cache, workers
from treewise.data.dataset import TreeDataset
from treewise.data.images import ImageReader
from treewise.data.io.files import PathLike
from treewise.data.io.options import LoadReport, RenderOptions
from treewise.data.io.printable import shown
from treewise.data.io.row_store import RowStore
from treewise.data.io.table import has_images
from treewise.data.records import RecordReader
from treewise.data.render.template import template_text
from treewise.data.selection import Trees, mix
from treewise.data.sources import Source, open_sources
from treewise.data.sources.foreign import read_sources
from treewise.data.tree_builder import TreeBuilder
from treewise.errors import ConfigError, DataError

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
    template_text(options.chat_template)  # an error also where rows hold tokens, or the cache all of them
    workers.choose_num_workers(num_workers, 0)
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
        builder = TreeBuilder(reader, self.on_bad_record, self.allow_partial_tail, self.quarantine, RowStore(folder))
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
        options = self.options
        return ImageReader(self.processor, images, options.max_image_bytes, from_network=options.images_from_network)


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
