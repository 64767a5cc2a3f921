"""Loading: sources through the cache or the workers to training trees, with nothing dropped silently."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np
import pyarrow as pa

from treewise.base import features
from treewise.base.hub import reachable
from treewise.data.dataset import TreeDataset
from treewise.data.io.field_checks import printable
from treewise.data.io.files import PathLike, Placed, tool_files
from treewise.data.io.options import LoadReport, RenderOptions
from treewise.data.io.replies import UnusableError
from treewise.data.io.rows import (
    MAPPED,
    RecordResult,
    Row,
    RowStore,
    cache_folder,
    cache_key,
    content_hash,
    has_images,
    read_entry,
    tokenizer_hash,
    write_entry,
)
from treewise.data.raw import is_part
from treewise.data.records import Job, RecordReader
from treewise.data.render.messages import find_tools
from treewise.data.render.template import NOW, template_text
from treewise.data.sources import Source, open_sources, read_sources
from treewise.errors import ConfigError, DataError, check_choice, did_you_mean, num

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from treewise.data.mixtures import Trees

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
MAX_WARNINGS = 1000
BATCH_BYTES = 256_000
BATCH_RECORDS = 256
MIN_BYTES_FOR_POOL = 1_000_000  # of the sources; below, starting processes costs more than they save
MAX_WORKERS = 16


def load_trees(
    data: Any,
    tokenizer: Any = None,
    *,
    options: RenderOptions | Mapping[str, Any] | None = None,
    num_workers: int | None = None,
    progress: bool | Callable[[int, int], object] = False,
    cache_dir: PathLike | None = None,
    on_bad_record: Literal["error", "quarantine"] = "error",
    quarantine_path: PathLike | None = None,
    allow_partial_tail: bool = False,
    read_only: bool = False,
    **unknown: object,
) -> "Trees":
    """Reads records of any form (`treewise.data.io.forms`) from any source, and groups them into training trees.

    Parameters:
        data: `.jsonl`, `.jsonl.gz`, `.json`, `.parquet`, `.arrow` files, folders or globs of them; a folder that
            `save_to_disk` wrote (`folder[split]`); `hf:org/name[split]`; a `datasets.Dataset` or `IterableDataset`; a
            pandas data frame; a list or iterator of mappings; a list of several of these, which groups may reach over.
            A list of `{"data": ..., "weight": 2}` is a mixture (see `treewise.data.mix`).
        tokenizer: a transformers tokenizer or the path of one; needed by records that hold text. For images
            the model's processor, or the path of one.
        options: how records are rendered and grouped; a mapping is taken as `RenderOptions(**options)`.
        num_workers: processes; 0 for none, by default all cores where the data is large enough.
        progress: show a progress bar, where there is a terminal or a notebook; or a function that gets bytes and
            records of each batch as it is read.
        cache_dir: folder of rendered data; by default `$TREEWISE_CACHE`, then `~/.cache/treewise`. Loads without a
            tokenizer, loads that left records out, and those of objects without a fingerprint are not cached.
        on_bad_record: stop at the first bad record, or write bad ones to `quarantine_path` and go on.
        quarantine_path: by default `quarantine.jsonl` in the working folder; written anew by each load.
        allow_partial_tail: leave out a last line that was cut off while it was written.
        read_only: write no file: the cache is read but not written, and bad records are counted only.

    Raises:
        DataError: a bad file or record, at `file:line`; no record at all.
        ConfigError: bad options, an unknown argument, or a tokenizer that cannot be loaded.
    """
    _refuse(unknown)
    options = RenderOptions.from_dict(options) if isinstance(options, Mapping) else options or RenderOptions()
    check_choice("on_bad_record", on_bad_record, ("error", "quarantine"))
    template_text(options.chat_template)  # an error also where rows hold tokens, or the cache all of them
    choose_num_workers(num_workers, 0)
    settings = _Settings(
        options=options,
        num_workers=num_workers,
        progress=progress,
        folder=cache_folder(cache_dir),
        quarantine=Path(os.devnull if read_only else quarantine_path or "quarantine.jsonl"),
        quarantines=on_bad_record == "quarantine",
        allow_partial_tail=allow_partial_tail,
        read_only=read_only,
    )
    tokenizer = _tokenizer(tokenizer)
    if not any(map(is_part, data if isinstance(data, list | tuple) else [data])):
        return _load(open_sources(data, options.max_record_bytes), tokenizer, settings)
    parts = features.mixtures.parts_of(data)
    if settings.quarantines:
        raise ConfigError("a mixture takes no on_bad_record='quarantine'; load its parts first, then mix them.")
    loaded = [_load(open_sources(part, options.max_record_bytes), tokenizer, settings) for part, _ in parts]
    return features.mixtures.mix(loaded, [weight for _, weight in parts])


def _refuse(unknown: Mapping[str, object]) -> None:
    for name in unknown:
        own = [parameter for parameter in signature(load_trees).parameters if parameter != "unknown"]
        options = list(RenderOptions.__dataclass_fields__)
        is_option = name in options
        hint = f" It is an option: options={{{name!r}: ...}}." if is_option else did_you_mean(name, [*own, *options])
        raise ConfigError(f"load_trees has no argument {name!r}.{hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The settings of a load; see `load_trees`."""

    options: RenderOptions
    num_workers: int | None
    progress: bool | Callable[[int, int], object]
    folder: Path  # of the cache
    quarantine: Path
    quarantines: bool
    allow_partial_tail: bool
    read_only: bool


def _load(
    sources: Sequence[Source], tokenizer: "PreTrainedTokenizerBase | ProcessorMixin | None", settings: _Settings
) -> TreeDataset:
    """The trees of all sources. tokenizer: a model's processor, or a tokenizer; None without one."""
    processor = tokenizer if hasattr(tokenizer, "image_processor") else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    merge = settings.options.merge_siblings, settings.options.routing_replay
    warnings: list[str] = []
    images = None
    if processor is not None:
        image_reader = features.image_records.image_reader
        images = image_reader(processor, settings.options, settings.folder, keeps=not settings.read_only)
    reader = RecordReader(tokenizer, settings.options, images)
    entry = _entry(sources, reader, settings)
    if entry is not None:
        try:
            stored = read_entry(entry) or read_entry(entry.with_suffix(MAPPED))
        except DataError as error:
            warnings.append(f"{error}; it was rendered again.")
        else:
            if stored is not None:
                return TreeDataset(*stored, LoadReport(**stored[1]["report"]), *merge)
    processes = choose_num_workers(settings.num_workers, sum(source.num_bytes for source in sources))
    if settings.quarantines:
        _refuse_data(settings.quarantine, sources)
    with TreeBuilder(reader, settings) as builder, _shown(settings.progress) as advance:
        jobs = read_sources(sources, builder.report, builder.drop_bad if settings.quarantines else None)
        for num_bytes, results in _read_all(jobs, reader, processes):
            for result in results:
                builder.add(result)
            advance(num_bytes, len(results))
        builder.finish_node_trees()
        table, facts, report = builder.result(len(sources))
    # An image's file may change without the record, so records with images are read each time.
    if entry is not None and not report.dropped and not settings.read_only and not has_images(table):
        path = entry.with_suffix(MAPPED) if builder.store.is_mapped else entry
        try:
            write_entry(path, table, {**facts, "report": asdict(report)})
        except OSError as error:
            warnings.append(f"{path}: the cache could not be written ({error.strerror}); the next load renders again.")
    report.warnings += warnings
    return TreeDataset(table, facts, report, *merge)


def _refuse_data(quarantine: Path, sources: Sequence[Source]) -> None:
    """Raises `ConfigError` where data would be written over before they are read."""
    own = quarantine.resolve()
    if any(source.data_file is not None and source.data_file.resolve() == own for source in sources):
        raise ConfigError(
            f"{quarantine} is among the data, and bad records are written over it (quarantine_path); give it another "
            "name, or leave it out."
        )


def choose_num_workers(num_workers: int | None, num_bytes: int) -> int:
    """Processes to start; 0 means this process. By default all cores, where there is enough to do."""
    if num_workers is not None:
        if num_workers < 0:
            raise ConfigError(f"num_workers is {num_workers}; give 0 (this process) or more.")
        return num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS) if num_bytes >= MIN_BYTES_FOR_POOL and cores > 1 else 0


def _read_all(jobs: Iterable[Job], reader: RecordReader, num_workers: int) -> Iterator[tuple[int, list[RecordResult]]]:
    """Batches of results in the order of the jobs, each with the bytes it came from."""
    if num_workers:
        return features.workers.read_all(_batches(jobs), reader, num_workers)
    return ((num_bytes, reader.read_batch(batch)) for num_bytes, batch in _batches(jobs))


def _batches(jobs: Iterable[Job]) -> Iterator[tuple[int, list[Job]]]:
    """Jobs in batches, each with its bytes."""
    batch: list[Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job[0].num_bytes
        if size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
            yield size, batch
            batch, size = [], 0
    if batch:
        yield size, batch


def _entry(sources: Sequence[Source], reader: RecordReader, settings: _Settings) -> Path | None:
    """The entry of the cache for all that the result depends on: names and content of sources, side files, options,
    tokenizer, and the date where the chat template writes one. None without a tokenizer, or where a source has no
    identity.
    """
    tokenizer = reader.tokenizer
    if tokenizer is None or any(source.data_file is None and source.identity is None for source in sources):
        return None
    names = [f"{source.name}\n{source.identity}" for source in sources]
    files = [source.data_file for source in sources if source.data_file is not None and source.identity is None]
    files += [path for source in sources if source.data_file is not None for path in tool_files(source.data_file)]
    template = settings.options.chat_template
    if template and "{" not in template and Path(template).is_file():
        files.append(Path(template))
    own = [settings.options.to_json(), str(settings.allow_partial_tail), tokenizer_hash(tokenizer)]
    text = reader.template_text()
    own.append(str(text))
    if NOW in str(text):  # a reader of its own, since what reads is sent to workers without a template
        own += RecordReader(tokenizer, settings.options, reader.images).template.dates
    return settings.folder / f"{cache_key([*own, *names], files)}.parquet"


def _tokenizer(tokenizer: Any) -> object:
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    from transformers import AutoProcessor, AutoTokenizer

    has_processor = any((Path(tokenizer) / name).is_file() for name in PROCESSOR_FILES)
    place = str(tokenizer) if Path(tokenizer).exists() else reachable(str(tokenizer))
    try:
        return (AutoProcessor if has_processor else AutoTokenizer).from_pretrained(place)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"tokenizer {str(tokenizer)!r} cannot be loaded: {reason}") from error


def _shown(progress: bool | Callable[[int, int], object]) -> AbstractContextManager[Callable[[int, int], object]]:
    """Gives `advance(num_bytes, num_records)`, which shows how far the load is."""
    if progress is True:
        return features.progress_bar.progress_bar()
    return nullcontext(progress or _unseen)


def _unseen(_num_bytes: int, _num_records: int) -> None:
    pass


@dataclass(slots=True)
class _Tree:
    name: str
    index: int
    num_records: int = 0
    num_rows: int = 0


class TreeBuilder:
    """Collects results in order into trees, and bad records into the quarantine. A context: its files are open inside.

    reader: of the records, and of trees that are given one node per line.
    """

    def __init__(self, reader: RecordReader, settings: _Settings) -> None:
        self.reader = reader
        self.settings = settings
        self.store = RowStore(settings.folder)
        self.stream: TextIO | None = None
        self.trees: list[_Tree] = []
        self.by_key: dict[str, _Tree] = {}
        self.by_rollout: dict[str, tuple[str, Any]] = {}
        self.node_trees: dict[tuple[str, str], tuple[_Tree, list[Placed]]] = {}
        self.report = LoadReport()
        self.warnings: dict[str, None] = {}
        self.counted: Counter[str] = Counter()

    def __enter__(self) -> "TreeBuilder":
        if self.settings.quarantines:
            path = self.settings.quarantine
            try:
                self.stream = path.open("w", encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"quarantine_path {path} cannot be written ({error.strerror}).") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
        if self.stream is not None:
            self.stream.close()

    def add(self, result: RecordResult) -> None:
        """Takes the next result in order."""
        self.report.num_records += not result.is_sample
        self.warnings.update(dict.fromkeys([*result.warnings, *result.drift]))
        self.counted.update(result.counted)
        for key in result.unused_keys:
            self.report.unused_keys[key] = self.report.unused_keys.get(key, 0) + 1
        self.report.num_compared += result.is_compared
        self.report.num_preferences += result.is_preference
        self.report.dates = list(dict.fromkeys([*self.report.dates, *result.dates]))
        self.report.num_drifted += bool(result.drift)
        if result.is_grouped_by_prompt and result.rollout is not None:
            # Rows of one rollout that name no group have different prompts: that of the first is the rollout's.
            first = (result.key or json.dumps(["rollout", result.rollout]), result.rows[0].group)
            result.key, group = self.by_rollout.setdefault(json.dumps(result.rollout), first)
            for row in result.rows:
                row.group = group
        self.report.dropped += result.left_out
        if result.error is not None:
            self._drop(result)
        elif result.node is not None:
            file, (name, node) = result.location.rpartition(":")[0], result.node
            if (file, name) not in self.node_trees:
                self.node_trees[file, name] = (self._new_tree(printable(json.loads(name))), [])
            self.node_trees[file, name][1].append(Placed(result.location, node, Path(file)))
        elif result.rows:
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
        self.report.num_trajectories += sum(row.parent is None or bool(row.is_end) for row in rows)
        self.store.add(tree.index, rows)

    def finish_node_trees(self) -> None:
        """Builds the trees that were given one node per line."""
        for (file, name), (tree, placed) in self.node_trees.items():
            try:
                self.reader.left_out = []
                rows_of = features.declared_trees.rows_of
                _, rows = rows_of(self.reader, placed, find_tools(placed[0]), is_forest=False)
            except UnusableError as error:
                self.report.dropped.append((error.location, error.reason))
            except DataError as error:
                text = json.dumps([node.value for node in placed], default=str)
                self._drop(RecordResult(f"{file}: tree {name}", error=str(error), raw=text))
            else:
                self.report.dropped += self.reader.left_out
                self.counted.update(self.reader.take_counted())
                self._add_rows(tree, rows)
                tree.num_records = len(placed)

    def result(self, num_sources: int) -> tuple[pa.Table, dict[str, Any], LoadReport]:
        """The table, what belongs to it, and the report."""
        report = self.report
        trees = [tree for tree in self.trees if tree.num_rows]
        if not trees:
            left = report.dropped_lines()
            reason = f" ({num(len(left), 'record')} left out; the first: {left[0]})" if left else ""
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
        report.warnings += [f"{text} ({num(count, 'time')})" for text, count in self.counted.items()]
        report.warnings += list(self.warnings)[:MAX_WARNINGS]
        if len(self.warnings) > MAX_WARNINGS:
            report.warnings.append(f"{len(self.warnings) - MAX_WARNINGS} more warnings")
        return table, facts, report

    def drop_bad(self, record: Placed, error: str) -> None:
        """Quarantines a bad record of a dump."""
        raw = record.value[""] if set(record.value) == {""} else json.dumps(record.value, default=str)
        self._drop(RecordResult(record.location, error=error, raw=raw))

    def _drop(self, result: RecordResult) -> None:
        assert result.error is not None
        partial = result.is_partial_tail and self.settings.allow_partial_tail
        if not partial and not self.settings.quarantines:
            raise DataError(result.error)
        self.report.dropped.append((result.location, result.error))
        if self.stream is not None:
            line = {"location": result.location, "reason": result.error, "record": result.raw}
            self.stream.write(json.dumps(line) + "\n")
