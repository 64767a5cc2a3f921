"""Sources: whatever holds or names records, opened as one list: files and folders, lists and iterators of mappings.

Data sets of `datasets`, names of the hub, data frames and Arrow tables are opened by `treewise.data.tables`, dumps of
other libraries read by `treewise.data.importers`, where a source is one.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from treewise.base import features
from treewise.base.paths import path_of
from treewise.data.io.field_checks import printable, shown
from treewise.data.io.files import (
    DEFAULT_MAX_RECORD_BYTES,
    Placed,
    RawRecord,
    check_magic,
    errors_named,
    find_files,
    json_lines,
)
from treewise.data.io.forms import has_form, parse
from treewise.data.io.options import LoadReport
from treewise.data.raw import is_table
from treewise.errors import DataError

KNOWN = (
    "a path, a folder, a glob, 'hf:org/name[split]', a datasets.Dataset, a pandas data frame, or a list or iterator of "
    "mappings"
)
HUB = "hf:"
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
    if is_table(data) or (isinstance(data, str | Path) and is_of_tables(str(data))):
        return [features.tables.opened(data)]
    if isinstance(data, str | Path):
        return [Source.of_file(file, max_record_bytes) for file in find_files(data)]
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


def _is_special(item: object) -> bool:
    """Whether an item of a list is no path of plain data files: an object, or the name of a data set."""
    return not isinstance(item, str | Path) or is_of_tables(str(item))


def is_of_tables(text: str) -> bool:
    """Whether a path names a data set: of the hub, an `.arrow` file, or a folder of `save_to_disk`."""
    return text.startswith(HUB) or text.endswith(".arrow") or _is_saved(folder_and_split(text)[0])


def folder_and_split(text: str) -> tuple[Path, str | None]:
    """The parts of `folder[split]`; of another path the split is None."""
    match = None if Path(text).exists() else _SPLIT.fullmatch(text)
    if match is None:
        return path_of(text), None
    return path_of(match["folder"]), match["split"]


def _is_saved(folder: Path) -> bool:
    try:
        is_set = (folder / SAVED_SET).is_file() and (folder / "dataset_info.json").is_file()
        return is_set or (folder / SAVED_SPLITS).is_file()
    except (OSError, ValueError):
        return False


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


def read_records(path: Path, max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES) -> Iterator[RawRecord]:
    """Raw records of one file in order.

    max_record_bytes: of a line, or of a `.json` file, after decompression; nothing longer is held in memory.
    """
    with errors_named(path):
        check_magic(path)
        if path.name.endswith(".parquet"):
            yield from features.tables.parquet_records(path)
        elif path.name.endswith((".json", ".json.gz")):
            from treewise.data.io.json_lists import json_list

            yield from json_list(path, max_record_bytes)
        else:
            yield from json_lines(path, max_record_bytes)


def read_sources(
    sources: Sequence[Source], report: LoadReport, drop: Callable[[Placed, str], None] | None = None
) -> Iterator[tuple[RawRecord, Path | None]]:
    """The records of sources in treewise's own forms, with their files. The keys of a source's first record say whether
    it is a dump; what importers leave out of one is reported. Those of logs of calls come last, for runs may reach
    over sources.

    drop: takes bad records of dumps, and their errors; None: they are errors.

    Raises:
        DataError: a source without a record; a dump that has not the shape of its format.
    """
    dumps = None
    for source in sources:
        records = source.records()
        first = next(records, None)
        if first is None:
            what = "the file is empty, or blank" if source.data_file else "it is empty"
            raise DataError(f"{source.name}: no record; {what}.")
        records, format = chain([first], records), _format_of(first)
        if format is None:
            for raw in records:
                yield raw, source.data_file or source.place
        else:
            dumps = dumps or features.importers.Dumps(report, drop)
            yield from dumps.read(source, format, records)
    if dumps is not None:
        yield from dumps.finish()


def _format_of(first: RawRecord) -> str | None:
    """The format of the dump that begins with a record; None for records in forms of treewise's own, and bad ones."""
    try:
        record = parse(first)
    except DataError:  # its reader says so, with the place
        return None
    if has_form(record):
        return None
    from treewise.data.io.formats import detect_format

    return detect_format(record)
