"""Rows of Arrow record batches as records: the values of each column by its type.

A column of `datasets` may hold JSON text (its feature `Json`, Arrow's type `arrow.json`), in lists and structs, too. It
is marked here and decoded where the record is parsed, in the worker processes, with the record's own location in an
error. What is left of the types has a plain meaning, or is an error that names column and type.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treewise.data.io.field_checks import printable, shown
from treewise.data.io.files import RawRecord
from treewise.data.io.rows import column_values
from treewise.data.tables.stored_json import StoredJson
from treewise.errors import DataError

BATCH_ROWS = 64
JSON = "arrow.json"
# Features of `datasets` whose Arrow values are the values of a record; `Json` is decoded. Others are files of a kind.
FEATURES = (
    *("Value", "ClassLabel", "Translation", "TranslationVariableLanguages", "List", "LargeList", "Sequence", "Image"),
    *(f"Array{number}D" for number in (2, 3, 4, 5)),
    "Json",
)
EXTENSIONS = re.compile(r"arrow\.(json|uuid|bool8)|datasets\.features\.features\.Array\dDExtensionType")
Mend = Callable[[Any], Any]


def arrow_records(
    batches: "Iterable[pa.RecordBatch]", name: str, features: Mapping[str, Any] | None = None
) -> Iterator[RawRecord]:
    """The rows of Arrow record batches, numbered from 1.

    features: of a data set, as `Features.to_dict` writes them; those in the schema's metadata where not given.

    Raises:
        DataError: a column of a type that has no meaning in a record.
    """
    number, schema, mends = 0, None, {}
    for batch in batches:
        if schema is None or not batch.schema.equals(schema, check_metadata=True):
            schema = batch.schema
            mends = mends_of(schema, _features_of(schema, name) if features is None else features, name)
        try:
            batch.validate(full=True)  # else what a damaged file points to is read, wherever that is
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"{name}: damaged behind row {number} ({shown(str(error))}); write it again.") from None
        num_bytes = batch.nbytes // max(1, batch.num_rows)
        columns = [_values(column, mends[key]) for key, column in zip(schema.names, batch.columns, strict=True)]
        for values in zip(*columns, strict=True):
            number += 1
            row = dict(zip(schema.names, values, strict=True))
            yield RawRecord(f"{name}:row {number}", row, is_row=True, num_bytes=num_bytes)


def parquet_records(path: Path) -> Iterator[RawRecord]:
    """The rows of a Parquet file. A text that rows share is held once, so that a small file stays small."""
    try:
        with pq.ParquetFile(path) as file:
            plain = {field.name for field in file.schema_arrow if not _is_extension(field)}
            columns = (file.schema.column(index) for index in range(len(file.schema)))
            texts = [
                column.path
                for column in columns
                if column.physical_type == "BYTE_ARRAY" and column.path.partition(".")[0] in plain
            ]
        with pq.ParquetFile(path, read_dictionary=texts) as file:
            yield from arrow_records(file.iter_batches(batch_size=BATCH_ROWS), printable(path))
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise DataError(f"{printable(path)}: damaged Parquet file ({shown(str(error))}); write it again.") from None


def row_values(row: Mapping[str, Any], location: str, is_padded: bool) -> dict[str, Any]:
    """The values of a row, with JSON read. is_padded: as in `treewise.data.io.files.parsed_object`."""
    return {key: _value(value, location, is_padded) for key, value in row.items()}


def _value(value: Any, location: str, is_padded: bool) -> object:
    """A value of a row, with JSON read, in which null is a value."""
    if isinstance(value, StoredJson):
        return value.value(location)
    if isinstance(value, dict):
        return {
            key: _value(item, location, is_padded) for key, item in value.items() if item is not None or not is_padded
        }
    if isinstance(value, list) and any(isinstance(item, dict | list | StoredJson) for item in value):
        return [_value(item, location, is_padded) for item in value]
    if isinstance(value, tuple | np.generic):
        return list(value) if isinstance(value, tuple) else value.item()
    return value


def _is_extension(field: pa.Field) -> bool:
    """Whether a field is of an extension of Arrow's types, or holds one."""
    kind = field.type
    if isinstance(kind, pa.BaseExtensionType) or b"ARROW:extension:name" in (field.metadata or {}):
        return True
    if pa.types.is_struct(kind):
        return any(map(_is_extension, kind))
    inner = kind.item_field if pa.types.is_map(kind) else getattr(kind, "value_field", None)
    return inner is not None and _is_extension(inner)


def _values(column: pa.Array, mend: Mend | None) -> Iterable[Any]:
    """The values of a column; those that are no lists of numbers are made one by one, as they are asked for."""
    kind = column.type
    if mend is None and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return column_values(column)
    return (mended(mend, value.as_py()) for value in column)


def mends_of(
    schema: pa.Schema, features: Mapping[str, Any], name: str, stored: Callable[..., object] = StoredJson
) -> dict[str, Mend | None]:
    """For each column what `_mend_of` gives. features: of `datasets`, by column. Raises as it does."""
    return {
        field.name: _mend_of(field, features.get(field.name), f"{name}: column {printable(field.name)}", stored)
        for field in schema
    }


def _mend_of(field: pa.Field, feature: object, where: str, stored: Callable[..., object]) -> Mend | None:
    """What turns Python values of an Arrow field (not null) into those of a record; None where they are the same.

    feature: of `datasets`, as plain JSON; None without one. stored: what marks JSON.

    Raises:
        DataError: a type that has no meaning in a record.
    """
    kind, name = field.type, feature.get("_type") if isinstance(feature, Mapping) else None
    if isinstance(name, str) and name not in FEATURES:
        raise DataError(
            f"{where} is of the type {printable(name)} of datasets, which is not read; leave the column out "
            "(remove_columns)."
        )
    extension = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode(errors="replace")
    if isinstance(kind, pa.BaseExtensionType):
        extension = kind.extension_name
    if extension and not EXTENSIONS.fullmatch(extension):
        raise DataError(
            f"{where} is of the Arrow type {printable(extension)}, which is not read; write plain numbers, texts, "
            "lists or structs, or leave the column out."
        )
    if extension == JSON or name == "Json":
        return partial(stored, field=field.name)
    if isinstance(kind, pa.BaseExtensionType):
        return str if extension == "arrow.uuid" else None
    if pa.types.is_run_end_encoded(kind):
        raise DataError(f"{where} is run-end encoded, which is not read; write plain values.")
    return _mend_of_nested(field, feature, where, stored)


def _mend_of_nested(field: pa.Field, feature: object, where: str, stored: Callable[..., object]) -> Mend | None:
    kind = field.type
    if pa.types.is_map(kind):
        inner = _mend_of(kind.item_field, None, f"{where}.value", stored)
        return lambda pairs: {str(key): mended(inner, value) for key, value in pairs}
    if pa.types.is_struct(kind):
        own = feature if isinstance(feature, Mapping) else {}
        mends = {child.name: _mend_of(child, own.get(child.name), f"{where}.{child.name}", stored) for child in kind}
        if not any(mends.values()):
            return None
        return lambda value: (
            {key: mended(mends.get(key), item) for key, item in value.items()} if isinstance(value, dict) else value
        )
    if hasattr(kind, "value_field"):  # lists of every kind
        inner_feature = feature.get("feature") if isinstance(feature, Mapping) else feature
        if isinstance(inner_feature, list):
            inner_feature = inner_feature[0] if inner_feature else None
        child = kind.value_field.with_name(field.name)
        if (inner := _mend_of(child, inner_feature, f"{where}[]", stored)) is None:
            return None
        return lambda value: [mended(inner, item) for item in value] if isinstance(value, list) else value
    return None


def mended(mend: Mend | None, value: object) -> object:
    """The value, if nothing is to be done, or what `mend` makes of it."""
    return value if mend is None or value is None else mend(value)


def _features_of(schema: pa.Schema, name: str) -> Mapping[str, Any]:
    """The features that `datasets` wrote into a schema; none where another library did."""
    written = (schema.metadata or {}).get(b"huggingface")
    if written is None:
        return {}
    try:
        found = json.loads(written)["info"].get("features")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{name}: the features that datasets wrote into its metadata are damaged ({type(error).__name__}); write "
            "it again."
        ) from None
    return found if isinstance(found, Mapping) else {}
