"""Record text in messages: escaped and short, so that content can never forge a message or flood a terminal."""

MAX_SHOWN = 60


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """A printable one-line excerpt of any value: control characters escaped, at most about `limit` characters."""
    if isinstance(value, str | bytes) and len(value) > limit:
        return ascii(value[:limit]) + "..."
    text = ascii(value)
    return text if len(text) <= limit + 2 else text[:limit] + "..."
