"""Sources: whatever holds or names records, opened as one list.

Files and folders; Arrow tables and what holds them: `datasets` (memory-mapped), folders of `save_to_disk`, the hub,
pandas; lists and iterators of mappings. Neither `datasets` nor pandas is imported unless a data set is opened by its
name or folder; objects come from modules that the caller has imported already.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from treewise.data.io.arrow_rows import Mend, mended, mends_of
from treewise.data.io.field_checks import printable, shown
from treewise.data.io.files import (
    DEFAULT_MAX_RECORD_BYTES,
    PARQUET_BATCH_ROWS,
    RawRecord,
    arrow_records,
    find_files,
    read_records,
)
from treewise.data.io.stored_json import StoredJson
from treewise.data.raw import is_of, is_table
from treewise.errors import ConfigError, DataError, did_you_mean, pip_install

KNOWN = (
    "a path, a folder, a glob, 'hf:org/name[split]', a datasets.Dataset, a pandas data frame, or a list or iterator of "
    "mappings"
)
HUB = "hf:"
HUB_SYNTAX = "'hf:org/name[split]', or with a configuration 'hf:org/name:config[split]'"
_HUB_NAME = re.compile(r"hf:(?P<name>[^\[\]:\s]+)(?::(?P<config>[^\[\]]+))?(?:\[(?P<split>.+)\])?")
_SPLIT = re.compile(r"(?P<folder>.+?)\[(?P<split>[^\[\]]+)\]")
SAVED_SET, SAVED_SPLITS = "state.json", "dataset_dict.json"


@dataclass(frozen=True, slots=True)
class Source:
    """Records of one origin, read in order.

    Parameters:
        name: in messages; each record's location begins with it.
        records: opens the source and yields its records. A source that is an iterator can be opened once.
        data_file: the file whose folder holds what a `tools_ref` or the path of an image names; None: none.
        place: the same where there is no file of records but a folder in which images may lie.
        num_bytes: an estimate of its size, which decides about worker processes.
        identity: changes whenever the content does; None: unknown, so what is rendered is not cached. Of a file the
            cache hashes the bytes instead.
    """

    name: str
    records: Callable[[], Iterator[RawRecord]]
    data_file: Path | None = None
    place: Path | None = None
    num_bytes: int = 0
    identity: str | None = None

    @classmethod
    def of_file(cls, path: Path, max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES) -> "Source":
        """A data file (`treewise.data.io.files.SUFFIXES`)."""
        return cls(printable(path), lambda: read_records(path, max_record_bytes), path, num_bytes=path.stat().st_size)


def open_sources(data: object, max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES) -> list[Source]:
    """The sources behind paths, names of the hub, data sets, data frames, tables, and lists or iterators of mappings.

    Raises:
        DataError: nothing, or something else; a path, split or name that does not exist; several splits at once.
    """
    if isinstance(data, str | Path):
        named = _open_hub(str(data)) if str(data).startswith(HUB) else _open_saved(str(data))
        return [Source.of_file(file, max_record_bytes) for file in find_files(data)] if named is None else [named]
    arrow = _open_object(data)
    if arrow is not None:
        return [arrow]
    if isinstance(data, list | tuple):
        return _open_list(list(data), max_record_bytes)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataError(f"data must be {KNOWN}; found {type(data).__name__}: {shown(data)}.")
    return [Source("records", lambda: _records_of(data, "records"))]


def _open_list(items: list[Any], max_record_bytes: int) -> list[Source]:
    if items and isinstance(items[0], Mapping) and not is_table(items[0]):
        return [Source("records", lambda: _records_of(items, "records"))]
    if not items or not any(_is_special(item) for item in items):
        return [Source.of_file(file, max_record_bytes) for file in find_files(items)]
    sources: dict[str, Source] = {}
    for item in items:
        for source in open_sources(item, max_record_bytes):
            name = source.name if source.data_file is None else str(source.data_file.resolve())
            while source.data_file is None and name in sources:
                name += "'"
            sources.setdefault(name, source)
    return list(sources.values())


def _records_of(items: Iterable[Any], name: str) -> Iterator[RawRecord]:
    for index, item in enumerate(items):
        location = f"{name}:{index}"
        if not isinstance(item, Mapping):
            raise DataError(f"{location}: a record must be a mapping, found {type(item).__name__}: {shown(item)}.")
        record = {str(key): plain(value) for key, value in item.items()}
        yield RawRecord(location, record, num_bytes=sys.getsizeof(item))


def _open_object(data: Any) -> Source | None:
    """The source of such an object; None for anything else.

    Raises:
        DataError: a dictionary of several splits.
    """
    if isinstance(data, pa.Table):
        return _of_table(data, "table")
    if is_of("pandas", data):
        return Source("data frame", lambda: _frame_records(data), num_bytes=int(data.memory_usage().sum()))
    if not is_of("datasets", data):
        return None
    if isinstance(data, dict):
        if len(data) != 1:
            names = ", ".join(map(str, data))
            raise DataError(f"a {type(data).__name__} of several splits ({names}): give one, such as data['train'].")
        ((_, data),) = data.items()
    name, split = getattr(getattr(data, "info", None), "dataset_name", None) or "dataset", getattr(data, "split", None)
    return _of_dataset(data, f"{name}[{split}]" if split else str(name))


def _is_special(item: object) -> bool:
    """Whether an item of a list is no path of plain data files: an object, or the name of a data set."""
    if not isinstance(item, str | Path):
        return True
    text = str(item)
    return text.startswith(HUB) or text.endswith(".arrow") or _is_saved(_folder_and_split(text)[0])


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
    try:
        data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of many libraries: no connection, no such name or split, a loading script
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        offline = any(word in reason.lower() for word in ("connect", "offline", "reach", "timed out"))
        hint = " The hub cannot be reached: download the data set where there is a network, and give its files."
        raise DataError(f"{text}: the data set cannot be loaded: {reason}{hint if offline else ''}") from error
    if isinstance(data, dict) and len(data) > 1:
        names = ", ".join(f"hf:{name}{':' + config if config else ''}[{each}]" for each in data)
        raise DataError(f"{text}: the data set has several splits; name one: {names}.")
    source = _open_object(data)
    assert source is not None
    folder = Path(name).expanduser() if Path(name).expanduser().is_dir() else Path(datasets.config.HF_CACHE_HOME)
    return replace(source, place=folder / SAVED_SET)


def _open_saved(text: str) -> Source | None:
    """A folder that `save_to_disk` wrote (`folder`, `folder[split]`), or an `.arrow` file; None for other paths.

    Raises:
        DataError: damaged files; no such split, or several and none named.
    """
    if text.endswith(".arrow"):
        return _open_arrow_file(Path(text).expanduser())
    folder, split = _folder_and_split(text)
    if not _is_saved(folder):
        return None
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


def _folder_and_split(text: str) -> tuple[Path, str | None]:
    match = None if Path(text).exists() else _SPLIT.fullmatch(text)
    if match is None:
        return Path(text).expanduser(), None
    return Path(match["folder"]).expanduser(), match["split"]


def _is_saved(folder: Path) -> bool:
    try:
        is_set = (folder / SAVED_SET).is_file() and (folder / "dataset_info.json").is_file()
        return is_set or (folder / SAVED_SPLITS).is_file()
    except (OSError, ValueError):
        return False


def _datasets(text: str) -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{text} needs the datasets package: {pip_install('datasets')}") from None
    return datasets


def _of_dataset(data: Any, name: str) -> Source:
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
        tables = data.with_format("arrow").iter(batch_size=PARQUET_BATCH_ROWS)
        batches = (batch for table in tables for batch in table.combine_chunks().to_batches())
        return arrow_records(batches, name, features)

    return Source(name, records, num_bytes=num_bytes, identity=identity)


def _stream_records(data: Any, features: Mapping[str, Any], name: str) -> Iterator[RawRecord]:
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


def _of_table(table: pa.Table, name: str, path: Path | None = None, identity: str | None = None) -> Source:
    batches = partial(table.to_batches, max_chunksize=PARQUET_BATCH_ROWS)
    return Source(name, lambda: arrow_records(batches(), name), path, num_bytes=table.nbytes, identity=identity)


def _open_arrow_file(path: Path) -> Source:
    """A memory-mapped Arrow file, as a stream (what `datasets` writes) or a file with a footer."""
    try:
        mapped = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_stream(mapped).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file or folder.") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not an Arrow file ({shown(str(error))}).") from None
    facts = path.stat()
    return _of_table(table, str(path), path, f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}")


def _frame_records(frame: Any) -> Iterator[RawRecord]:
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


def plain(value: Any) -> Any:
    """Tensors, arrays and tuples as the arrays and lists that a record holds; nested ones, too."""
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return value if value.ndim == 1 and value.dtype != object else plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value] if any(not isinstance(i, int | float | str) for i in value) else [*value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value
