"""Data sets, data frames and tables as sources: Arrow tables and what holds them.

`datasets` (memory-mapped), folders of `save_to_disk`, the hub, pandas. Neither `datasets` nor pandas is imported unless
a data set is opened by its name or folder; objects come from modules that the caller has imported already.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

import pyarrow as pa

from treewise.base.hub import asking_nobody, why_unreachable
from treewise.base.paths import path_of
from treewise.data.io.field_checks import shown
from treewise.data.io.files import RawRecord
from treewise.data.raw import is_of
from treewise.data.sources import HUB, SAVED_SET, Source, folder_and_split, plain
from treewise.data.tables.arrow_rows import BATCH_ROWS, Mend, arrow_records, mended, mends_of
from treewise.data.tables.stored_json import StoredJson
from treewise.errors import ConfigError, DataError, did_you_mean, pip_install

HUB_SYNTAX = "'hf:org/name[split]', or with a configuration 'hf:org/name:config[split]'"
_HUB_NAME = re.compile(r"hf:(?P<name>[^\[\]:\s]+)(?::(?P<config>[^\[\]]+))?(?:\[(?P<split>.+)\])?")


class Dataset(Protocol):
    """What is read of data sets of `datasets`; an `IterableDataset` lacks what tells a size."""

    features: Any  # of datasets' own classes; None where a stream has none
    format: Mapping[str, object]
    num_rows: int
    data: "HasSize"
    epoch: int

    def with_format(self, kind: str | None) -> "Dataset": ...
    def iter(self, *, batch_size: int) -> Iterator[pa.Table]: ...
    def cast(self, features: object) -> "Dataset": ...
    def set_epoch(self, epoch: int) -> None: ...
    def __iter__(self) -> Iterator[Mapping[str, object]]: ...


class HasSize(Protocol):
    """Its table."""

    num_rows: int
    nbytes: int


class Frame(Protocol):
    """What is read of a data frame of pandas."""

    dtypes: Mapping[object, object]
    columns: Iterable[object]

    def itertuples(self, *, index: bool, name: None) -> Iterable[tuple[object, ...]]: ...


def opened(data: Any) -> Source:
    """The source of such an object, or of the path or the name of one.

    Raises:
        DataError: a path, split or name that does not exist; damaged files; several splits at once.
    """
    if not isinstance(data, str | Path):
        return _open_object(data)
    text = str(data)
    if text.startswith(HUB):
        return _open_hub(text)
    return _open_arrow_file(path_of(text)) if text.endswith(".arrow") else _open_saved(text)


def _open_object(data: Any) -> Source:
    if isinstance(data, pa.Table):
        return _of_table(data, "table", data.nbytes)
    if is_of("pandas", data):
        return Source("data frame", lambda: _frame_records(data), num_bytes=int(data.memory_usage().sum()))
    if isinstance(data, dict):
        if len(data) != 1:
            names = ", ".join(map(str, data))
            raise DataError(f"a {type(data).__name__} of several splits ({names}): give one, such as data['train'].")
        ((_, data),) = data.items()
    name, split = getattr(getattr(data, "info", None), "dataset_name", None) or "dataset", getattr(data, "split", None)
    return _of_dataset(data, f"{name}[{split}]" if split else str(name))


def _open_hub(text: str) -> Source:
    """A data set of the hub, by `hf:org/name[split]`. Uses the cache and the settings of `datasets`.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: another spelling; a name that cannot be loaded; several splits and none named.
    """
    match = _HUB_NAME.fullmatch(text)
    if match is None:
        raise DataError(f"{shown(text)}: a data set of the hub is written {HUB_SYNTAX}.")
    datasets = _datasets(text)
    name, config, split = match["name"], match["config"], match["split"]
    unreachable = None if path_of(name).exists() else why_unreachable()
    try:
        from huggingface_hub import constants

        with asking_nobody([] if unreachable is None else [constants, datasets.config]):
            data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of many libraries: no connection, no such name or split, a loading script
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        offline = any(word in reason.lower() for word in ("connect", "offline", "reach", "timed out"))
        why = f" ({unreachable})" if unreachable else ""
        hint = f" The Hub cannot be reached{why}: download the data set where there is a network, and give its files."
        offline = offline or unreachable is not None
        raise DataError(f"{text}: the data set cannot be loaded: {reason}{hint if offline else ''}") from error
    if isinstance(data, dict) and len(data) > 1:
        names = ", ".join(f"hf:{name}{':' + config if config else ''}[{each}]" for each in data)
        raise DataError(f"{text}: the data set has several splits; name one: {names}.")
    folder = path_of(name) if path_of(name).is_dir() else Path(datasets.config.HF_CACHE_HOME)
    return replace(_open_object(data), place=folder / SAVED_SET)


def _open_saved(text: str) -> Source:
    """A folder that `save_to_disk` wrote (`folder`, `folder[split]`)."""
    folder, split = folder_and_split(text)
    try:
        data = _datasets(text).load_from_disk(str(folder))
    except ConfigError:
        raise
    except Exception as error:  # arrow's, json's, and several of datasets' own
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{folder}: a folder of save_to_disk that is damaged, or of a later version of datasets "
            f"({type(error).__name__}: {reason})."
        ) from error
    if not isinstance(data, dict):
        if split is not None:
            raise DataError(f"{text}: the folder holds one data set, without splits; leave [{split}] out.")
        return replace(_of_dataset(data, str(folder)), place=folder / SAVED_SET)
    if split is None and len(data) == 1:
        (split,) = data
    if split not in data:
        hint = "" if split is None else did_you_mean(split, data)
        raise DataError(f"{text}: name one of its splits: {', '.join(f'{folder}[{name}]' for name in data)}.{hint}")
    return replace(_of_dataset(data[split], str(folder / str(split))), place=folder / SAVED_SET)


def _datasets(text: str) -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{text} needs the datasets package: {pip_install('datasets')}") from None
    return datasets


def _of_dataset(data: Dataset, name: str) -> Source:
    features = data.features.to_dict() if data.features else {}
    if not hasattr(data, "num_rows"):  # an IterableDataset: its size is not known before its end
        return Source(name, lambda: _stream_records(data, features, name))
    identity = getattr(data, "_fingerprint", None)
    if data.format["type"] == "custom":  # a transformation at access, which the fingerprint does not cover
        read = partial(StoredJson, is_read=True)
        mends = mends_of(data.features.arrow_schema, features, name, read) if features else {}
        return Source(name, lambda: _mapping_records(data, name, mends))
    fraction = data.num_rows / max(1, data.data.num_rows)  # of a selection
    num_bytes = int(data.data.nbytes * fraction)

    def records() -> Iterator[RawRecord]:
        tables = data.with_format("arrow").iter(batch_size=BATCH_ROWS)
        batches = (batch for table in tables for batch in table.combine_chunks().to_batches())
        return arrow_records(batches, name, features)

    return Source(name, records, num_bytes=num_bytes, identity=identity)


def _stream_records(data: Dataset, features: Mapping[str, Any], name: str) -> Iterator[RawRecord]:
    """Rows of an `IterableDataset`. Its JSON columns are read as they are stored, as far as it still has that."""
    stream = data.with_format(None)
    mends = mends_of(data.features.arrow_schema, features, name, StoredJson.of_stream) if features else {}
    if any(mends.values()):
        stream = stream.cast(type(data.features).from_dict(_undecoded(features)))
    stream.set_epoch(data.epoch)
    yield from _mapping_records(stream, name, mends)


def _undecoded(feature: Any) -> Any:
    """Features of `datasets` whose JSON stays the text that is stored."""
    if isinstance(feature, list):
        return [_undecoded(item) for item in feature]
    if not isinstance(feature, Mapping):
        return feature
    if feature.get("_type") == "Json":
        return {**feature, "decode": False}
    return {key: _undecoded(item) for key, item in feature.items()}


def _mapping_records(
    data: Iterable[Mapping[str, object]], name: str, mends: Mapping[str, Mend | None] = MappingProxyType({})
) -> Iterator[RawRecord]:
    for number, row in enumerate(data, 1):
        record = {key: mended(mends.get(key), plain(value)) for key, value in row.items()}
        yield RawRecord(f"{name}:row {number}", record, is_row=True)


def _of_table(
    table: pa.Table, name: str, num_bytes: int, path: Path | None = None, identity: str | None = None
) -> Source:
    batches = partial(table.to_batches, max_chunksize=BATCH_ROWS)
    return Source(name, lambda: arrow_records(batches(), name), path, num_bytes=num_bytes, identity=identity)


def _open_arrow_file(path: Path) -> Source:
    """A memory-mapped Arrow file, as a stream (what `datasets` writes) or a file with a footer."""
    try:
        mapped = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_stream(mapped).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        mends_of(table.schema, {}, str(path))  # an error for types that are not read, before anything is
    except FileNotFoundError:
        raise DataError(f"{path}: no such file or folder.") from None
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise DataError(f"{path}: not an Arrow file ({shown(str(error))}).") from None
    facts = path.stat()
    if table.num_rows > 8 * facts.st_size:
        raise DataError(f"{path}: {table.num_rows:,} rows in {facts.st_size:,} bytes; write it again.")
    return _of_table(table, str(path), facts.st_size, path, f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}")


def _frame_records(frame: Frame) -> Iterator[RawRecord]:
    """Rows of a data frame; NaN, NaT and None in a cell stand for an absent field, as pandas writes them."""

    def is_there(value: object) -> bool:
        is_nan = isinstance(value, float) and value != value
        return value is not None and not is_nan and type(value).__name__ not in ("NAType", "NaTType")

    typed = [(str(key), dtype.pyarrow_dtype) for key, dtype in frame.dtypes.items() if hasattr(dtype, "pyarrow_dtype")]
    mends = mends_of(pa.schema(typed), {}, "data frame")
    names, rows = list(map(str, frame.columns)), frame.itertuples(index=False, name=None)
    cells = (zip(names, values, strict=True) for values in rows)
    present = ({name: value for name, value in row if is_there(value)} for row in cells)
    return _mapping_records(present, "data frame", mends)
