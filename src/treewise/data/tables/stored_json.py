"""JSON text that a column of type `Json` of `datasets` stores for a value of any kind."""

import json
import re
from dataclasses import dataclass

from treewise.data.io.field_checks import shown
from treewise.errors import DataError

# Fields of records that are text, or else a list of objects with one of these keys. `datasets` stores a text that reads
# as JSON ("42", "[1, 2]") as it is, so its stored form is the text.
TEXT_FIELDS: dict[str, tuple[str, ...]] = {
    "content": ("type",),
    **dict.fromkeys(("prompt", "completion", "chosen", "rejected"), ("role", "from", "type")),
    **dict.fromkeys(("text", "value", "instruction", "reasoning_content", "reasoning", "thinking", "refusal"), ()),
}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True, slots=True)
class StoredJson:
    """A JSON value in a column, and the field of a record that holds it.

    stored: its text (bytes, to some versions of pyarrow); where `is_read` the value that `datasets` has made of it.
    """

    stored: object
    field: str
    is_read: bool = False

    @classmethod
    def of_stream(cls, value: object, field: str) -> "StoredJson":
        """The same of a stream: stored text, or a value that a map or filter has read."""
        is_read = not isinstance(value, str)
        if isinstance(value, str):
            try:
                json.loads(value)
            except (ValueError, RecursionError):
                is_read = True
        return cls(value, field, is_read)

    def value(self, location: str) -> object:
        """The value.

        Raises:
            DataError: text that is not JSON; a text that `datasets` has read as JSON, so that it is lost.
        """
        value = self.stored if self.is_read else self._parsed(location)
        if self.field == "arguments" and isinstance(value, dict) and not self.is_read:
            is_spaced = re.search(r"\s", _STRING.sub("", self._text()))
            return self._text() if is_spaced else value  # of a text; `datasets` writes objects without white space
        keys = TEXT_FIELDS.get(self.field)
        if keys is None or isinstance(value, str):
            return value
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict) and item.keys() & set(keys) for item in items):
            return value
        if self.is_read:
            raise DataError(
                f"{location}: {self.field} is {shown(value)}: a column of type Json, where a text that reads as JSON "
                "becomes a value in map and filter of a stream, and in transforms; give the data set without them, or "
                "the file."
            )
        return self._text()

    def _text(self) -> str:
        return self.stored.decode(errors="replace") if isinstance(self.stored, bytes) else str(self.stored)

    def _parsed(self, location: str) -> object:
        text = self._text()
        try:
            value = json.loads(text)
            if "\\u" in text:
                json.dumps(value, ensure_ascii=False).encode()  # an error for half of a surrogate pair
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            raise DataError(
                f"{location}: {self.field}, a column of type Json, holds text that is not valid JSON ({reason}): "
                f"{shown(text)}."
            ) from None
        return value
