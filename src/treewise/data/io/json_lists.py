"""Files that hold one JSON list of records (`.json`, `.json.gz`)."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from treewise.data.io.field_checks import json_kind, printable, shown
from treewise.data.io.files import UTF8_MARK, RawRecord, read_bytes
from treewise.errors import DataError

_SPACE = re.compile(r"[ \t\r\n]*")


def json_list(path: Path, limit: int) -> Iterator[RawRecord]:
    """One JSON list of records. Elements are cut by the decoder one by one, so each has its physical line; where others
    begin on it, too, also its number in the list, because rollouts and trees without a name are named by location. Each
    is handed on as its text, and read as a line of JSON Lines is.
    """
    data = read_bytes(path, limit)
    skip = len(UTF8_MARK) if data.startswith(UTF8_MARK) else 0
    try:
        text = data[skip:].decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{printable(path)}: not UTF-8 at byte {error.start + skip}; save the file as UTF-8.") from None
    position = _skip_space(text, 0)
    if text[position : position + 1] != "[":
        raise DataError(
            f"{printable(path)}: a .json file must hold one list of records, and it begins with "
            f"{shown(text[position : position + 60])}; save the list alone, or one record per line as .jsonl."
        )
    decoder = json.JSONDecoder()
    position = _skip_space(text, position + 1)
    line, counted, number, last_line, offset = 1, 0, 0, 0, skip
    while text[position : position + 1] != "]":
        line, offset = line + text.count("\n", counted, position), offset + len(text[counted:position].encode())
        counted, number = position, number + 1
        location = f"{printable(path)}:{line}" + (f" record {number}" if line == last_line else "")
        last_line = line
        try:
            value, end = decoder.raw_decode(text, position)
            payload, position = text[position:end].encode(), _skip_space(text, end)
            if text[position : position + 1] == ",":
                position = _skip_space(text, position + 1)
            elif text[position : position + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
        except json.JSONDecodeError as error:
            raise DataError(f"{printable(path)}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}.") from None
        except (RecursionError, ValueError) as error:
            raise DataError(f"{location}: JSON that cannot be read ({type(error).__name__}).") from None
        if not isinstance(value, dict):
            raise DataError(f"{location}: a record must be a JSON object, found {json_kind(value)}.")
        yield RawRecord(location, payload, offset, num_bytes=position - counted)
    if text[position + 1 :].strip():
        raise DataError(f"{printable(path)}: text after the end of the list; a .json file holds one list.")


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()
