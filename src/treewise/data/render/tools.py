"""Function schemas of a record: its own `tools`, or a `tools_ref` into a file that lies beside the data."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from treewise.data.io.files import read_bytes, stem
from treewise.data.io.printable import shown
from treewise.data.io.record_forms import Record
from treewise.data.render.messages import clean_tools
from treewise.errors import DataError


def tool_files(data_file: Path) -> list[Path]:
    """Files that `tools_ref` of a data file may point into, nearest first; those that exist."""
    names = (f"{stem(data_file)}_tools.json", "tools.json")
    paths = [data_file.parent / f"{name}{suffix}" for name in names for suffix in ("", ".gz")]
    return [path for path in paths if path.is_file()]


def find_tools(record: Record, data_file: Path | None, location: str) -> list[dict[str, Any]] | None:
    """Function schemas of a record, or None.

    Raises:
        DataError: a `tools_ref` without a file that holds it; tools that are not a list of objects.
    """
    if record.get("tools") is None and isinstance(record.get("functions"), list):  # OpenAI's older name
        functions = [{"type": "function", "function": function} for function in record["functions"]]
        return clean_tools(functions, location)
    if record.get("tools") is not None or record.get("tools_ref") is None:
        return clean_tools(record.get("tools"), location)
    name = record["tools_ref"]
    if data_file is None:
        raise DataError(
            f"{location}: tools_ref {shown(name)} is looked up beside the data file, and this record is from none; "
            "give `tools`."
        )
    files = tool_files(data_file)
    for path in files:
        known = _tools_of(path)
        if isinstance(name, str) and name in known:
            return clean_tools(known[name], f"{path}: {shown(name)}")
    looked = ", ".join(str(path) for path in files) or f"no tools.json or {stem(data_file)}_tools.json beside the file"
    raise DataError(f"{location}: tools_ref {shown(name)} was not found ({looked}).")


@lru_cache(maxsize=64)
def _tools_of(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not valid JSON ({shown(str(error))}).") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: must be one JSON object of tool lists by name.")
    return value
