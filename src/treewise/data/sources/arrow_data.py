"""Arrow tables and what holds them: `datasets` (memory-mapped), folders of `save_to_disk`, the hub, pandas.

Neither `datasets` nor pandas is imported unless a data set is opened by its name or folder; objects come from modules
that the caller has imported already.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from treewise.data.io.files import PARQUET_BATCH_ROWS, RawRecord, batch_records
from treewise.data.io.printable import shown
from treewise.data.sources.source import Source, plain
from treewise.errors import ConfigError, DataError, did_you_mean, pip_install

HUB = "hf:"
_HUB_NAME = re.compile(r"hf:(?P<name>[^\[\]:\s]+)(?::(?P<config>[^\[\]]+))?(?:\[(?P<split>.+)\])?")
_SPLIT = re.compile(r"(?P<folder>.+?)\[(?P<split>[^\[\]]+)\]")
SAVED_SET, SAVED_SPLITS = "state.json", "dataset_dict.json"
HUB_SYNTAX = "'hf:org/name[split]', or with a configuration 'hf:org/name:config[split]'"


def is_arrow_object(data: Any) -> bool:
    """Whether this is a data set of `datasets`, a pandas data frame, or an Arrow table."""
    return isinstance(data, pa.Table) or _is_of("datasets", data) or _is_of("pandas", data)


def open_object(data: Any) -> Source | None:
    """The source of such an object; None for anything else.

    Raises:
        DataError: a dictionary of several splits.
    """
    if isinstance(data, pa.Table):
        return Source("table", lambda: _table_records(data, "table"), num_bytes=data.nbytes)
    if _is_of("pandas", data):
        return Source("data frame", lambda: _frame_records(data), num_bytes=int(data.memory_usage().sum()))
    if not _is_of("datasets", data):
        return None
    if isinstance(data, dict):
        if len(data) != 1:
            names = ", ".join(map(str, data))
            raise DataError(f"a {type(data).__name__} of several splits ({names}): give one, such as data['train'].")
        ((_, data),) = data.items()
    return _of_dataset(data, _name_of(data))


def is_special_path(text: str) -> bool:
    """Whether a path names a data set of the hub, or one that `save_to_disk` wrote."""
    folder, _ = _folder_and_split(text)
    return text.startswith(HUB) or _is_saved(folder) or text.endswith(".arrow")


def open_hub(text: str) -> Source:
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
    source = open_object(data)
    assert source is not None
    return source


def open_saved(text: str) -> Source | None:
    """A folder that `save_to_disk` wrote (`folder`, `folder[split]`), or an `.arrow` file; None for other paths.

    Raises:
        DataError: damaged files; no such split, or several and none named.
    """
    if text.endswith(".arrow"):
        return _open_arrow_file(Path(text).expanduser())
    folder, split = _folder_and_split(text)
    if not _is_saved(folder):
        return None
    datasets = _datasets(text)
    if (folder / SAVED_SPLITS).is_file():
        names = [path.name for path in sorted(folder.iterdir()) if (path / SAVED_SET).is_file()]
        if split is None and len(names) == 1:
            split = names[0]
        if split not in names:
            hint = "" if split is None else did_you_mean(split, names)
            raise DataError(f"{text}: name one of its splits: {', '.join(f'{folder}[{n}]' for n in names)}.{hint}")
        folder = folder / str(split)
    elif split is not None:
        raise DataError(f"{text}: the folder holds one data set, without splits; leave [{split}] out.")
    try:
        data = datasets.load_from_disk(str(folder))
    except Exception as error:  # arrow's, json's, and several of datasets' own
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{folder}: a damaged folder of save_to_disk ({type(error).__name__}: {reason}).") from error
    return _of_dataset(data, str(folder))


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


def _datasets(text: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{text} needs the datasets package: {pip_install('datasets')}") from None
    return datasets


def _is_of(library: str, data: Any) -> bool:
    """Whether this is a data set or data frame of a library, which is not imported for the question."""
    module = sys.modules.get(library)
    if module is None:
        return False
    names = {
        "datasets": ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict"),
        "pandas": ("DataFrame",),
    }[library]
    return isinstance(data, tuple(getattr(module, name) for name in names))


def _name_of(data: Any) -> str:
    name = getattr(getattr(data, "info", None), "dataset_name", None) or "dataset"
    split = getattr(data, "split", None)
    return f"{name}[{split}]" if split else str(name)


def _of_dataset(data: Any, name: str) -> Source:
    if not hasattr(data, "num_rows"):  # an IterableDataset: its size is not known before its end
        return Source(name, lambda: _mapping_records(data, name))
    identity = getattr(data, "_fingerprint", None)
    if data.format["type"] == "custom":  # a transformation at access, which the fingerprint does not cover
        return Source(name, lambda: _mapping_records(data, name))
    fraction = data.num_rows / max(1, data.data.num_rows)  # of a selection
    num_bytes = int(data.data.nbytes * fraction)
    return Source(name, lambda: _dataset_records(data, name), num_bytes=num_bytes, identity=identity)


def _dataset_records(data: Any, name: str) -> Iterator[RawRecord]:
    start = 1
    for table in data.with_format("arrow").iter(batch_size=PARQUET_BATCH_ROWS):
        for batch in table.combine_chunks().to_batches():
            yield from batch_records(batch, name, start)
            start += batch.num_rows


def _mapping_records(data: Any, name: str) -> Iterator[RawRecord]:
    for number, row in enumerate(data, 1):
        yield RawRecord(f"{name}:row {number}", {key: plain(value) for key, value in row.items()}, is_row=True)


def _table_records(table: pa.Table, name: str) -> Iterator[RawRecord]:
    start = 1
    for batch in table.to_batches(max_chunksize=PARQUET_BATCH_ROWS):
        yield from batch_records(batch, name, start)
        start += batch.num_rows


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
    identity = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    return Source(str(path), lambda: _table_records(table, str(path)), path, table.nbytes, identity)


def _frame_records(frame: Any) -> Iterator[RawRecord]:
    """Rows of a data frame; NaN, NaT and None in a cell stand for an absent field, as pandas writes them."""
    names = [str(name) for name in frame.columns]
    for index, values in enumerate(frame.itertuples(index=False, name=None)):
        row = {name: plain(value) for name, value in zip(names, values, strict=True) if not _is_missing(value)}
        yield RawRecord(f"data frame:row {index + 1}", row, is_row=True)


def _is_missing(value: Any) -> bool:
    if value is None or isinstance(value, float):
        return value is None or value != value
    return type(value).__name__ in ("NAType", "NaTType")
