"""Opens whatever names or holds records, in one list of sources."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from treewise.data.io.files import DEFAULT_MAX_RECORD_BYTES, RawRecord, find_files
from treewise.data.io.printable import shown
from treewise.data.sources import arrow_data
from treewise.data.sources.source import Source, plain
from treewise.errors import DataError

KNOWN = (
    "a path, a folder, a glob, 'hf:org/name[split]', a datasets.Dataset, a pandas data frame, or a list or iterator of "
    "mappings"
)


def open_sources(data: Any, max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES) -> list[Source]:
    """The sources behind paths, names of the hub, data sets, data frames, tables, and lists or iterators of mappings.

    Raises:
        DataError: nothing, or something else; a path, split or name that does not exist; several splits at once.
    """
    if isinstance(data, str | Path):
        return _open_path(data, max_record_bytes)
    arrow = arrow_data.open_object(data)
    if arrow is not None:
        return [arrow]
    if isinstance(data, list | tuple):
        return _open_list(list(data), max_record_bytes)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataError(f"data must be {KNOWN}; found {type(data).__name__}: {shown(data)}.")
    return [Source("records", lambda: _records_of(data, "records"))]


def is_raw_data(data: Any) -> bool:
    """Whether this holds or names records that have yet to be read, in contrast to forests and trajectories."""
    if isinstance(data, str | Path) or arrow_data.is_arrow_object(data):
        return True
    if isinstance(data, list | tuple):
        return bool(data) and isinstance(data[0], str | Path | Mapping)
    return isinstance(data, Iterator)


def _open_path(path: str | Path, max_record_bytes: int) -> list[Source]:
    text = str(path)
    if text.startswith(arrow_data.HUB):
        return [arrow_data.open_hub(text)]
    saved = arrow_data.open_saved(text)
    return [saved] if saved is not None else [Source.of_file(file, max_record_bytes) for file in find_files(path)]


def _open_list(items: list[Any], max_record_bytes: int) -> list[Source]:
    if items and isinstance(items[0], Mapping) and not arrow_data.is_arrow_object(items[0]):
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


def _is_special(item: Any) -> bool:
    """Whether an item of a list is no path of plain data files."""
    if isinstance(item, str | Path):
        return arrow_data.is_special_path(str(item))
    return True


def _records_of(items: Iterable[Any], name: str) -> Iterator[RawRecord]:
    for index, item in enumerate(items):
        location = f"{name}:{index}"
        if not isinstance(item, Mapping):
            raise DataError(f"{location}: a record must be a mapping, found {type(item).__name__}: {shown(item)}.")
        record = {str(key): plain(value) for key, value in item.items()}
        yield RawRecord(location, record, num_bytes=sys.getsizeof(item))
