"""What holds or names records that have yet to be read, in contrast to forests and trajectories."""

from collections.abc import Iterator, Mapping
from pathlib import Path

# Classes of data sets, data frames and tables, by library.
CLASSES = {
    "datasets": ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict"),
    "pandas": ("DataFrame",),
    "pyarrow": ("Table",),
}

PART = {"data", "path", "weight"}
OF_AXOLOTL = {
    *("type", "ds_type", "name", "split", "train_on_split", "shards", "data_files", "field", "chat_template", "roles"),
    *("field_messages", "message_property_mappings", "message_field_role", "message_field_content", "roles_to_train"),
}  # further keys of its data sets


def is_raw_data(data: object) -> bool:
    """Whether these are records, or name some."""
    if isinstance(data, str | Path) or is_table(data):
        return True
    if isinstance(data, list | tuple):
        return bool(data) and isinstance(data[0], str | Path | Mapping)
    return isinstance(data, Iterator)


def is_part(item: object) -> bool:
    """Whether an item of data is a part of a mixture, `{"data": ..., "weight": ...}`, or one as axolotl has it."""
    if not isinstance(item, Mapping) or not item:
        return False
    return set(item) <= PART or ("path" in item and set(item) <= PART | OF_AXOLOTL)


def is_table(data: object) -> bool:
    """Whether this is a data set of `datasets`, a pandas data frame, or an Arrow table."""
    return any(is_of(library, data) for library in CLASSES)


def is_of(library: str, data: object) -> bool:
    """Whether this is an object of a library's `CLASSES`; does not import it."""
    kinds = type(data).__mro__
    return any(kind.__name__ in CLASSES[library] and kind.__module__.partition(".")[0] == library for kind in kinds)
