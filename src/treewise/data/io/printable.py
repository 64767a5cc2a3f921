"""Record text in messages: escaped and short, so that content can never forge a message or flood a terminal."""

import re

MAX_SHOWN = 60
# Control characters (line ends, too), marks that reverse the direction of text, and halves of surrogate pairs.
_RAW = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """A printable one-line excerpt of any value: control characters escaped, at most about `limit` characters."""
    if isinstance(value, str | bytes) and len(value) > limit:
        return ascii(value[:limit]) + "..."
    text = ascii(value)
    return text if len(text) <= limit + 2 else text[:limit] + "..."


def printable(text: object) -> str:
    """Text of any length with its control characters escaped: names and paths that a terminal may show as they are."""
    return _RAW.sub(lambda match: ascii(match.group())[1:-1], str(text))


def json_kind(value: object) -> str:
    """What a value that is no object is called in JSON, for messages."""
    if isinstance(value, list):
        return "a list; records are one a line, or in a .json file that holds one list"
    return "null" if value is None else "text" if isinstance(value, str) else f"{value!r:.40}"
