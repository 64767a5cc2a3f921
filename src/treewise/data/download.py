"""Files from network addresses, where the data's options allow them: limited in size, and in time as a whole."""

import time

from treewise.data.io.printable import shown
from treewise.errors import ConfigError, DataError

NETWORK = ("http:", "https:", "ftp:")  # how an address of another machine begins
MAX_BYTES = 50_000_000
MAX_SECONDS = 60.0
MAX_REDIRECTS = 5


def downloaded(address: str, location: str) -> bytes:
    """The bytes at an http or https address.

    Raises:
        DataError: another protocol, an answer without success, too many bytes, or too much time.
        ConfigError: httpx is not installed.
    """
    try:
        import httpx
    except ImportError:
        raise ConfigError("images_from_network needs httpx; install it: pip install httpx.") from None
    end = time.monotonic() + MAX_SECONDS
    parts, size = [], 0
    try:
        with (
            httpx.Client(follow_redirects=True, max_redirects=MAX_REDIRECTS, timeout=max(MAX_SECONDS, 1)) as client,
            client.stream("GET", address) as answer,
        ):
            answer.raise_for_status()
            for part in answer.iter_bytes():
                parts.append(part)
                size += len(part)
                if size > MAX_BYTES:
                    raise DataError(f"{location}: {shown(address)} has more than {MAX_BYTES:,} bytes; shrink the file.")
                if time.monotonic() > end:
                    raise DataError(f"{location}: {shown(address)} took more than {MAX_SECONDS:g} seconds.")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{location}: {shown(address)} cannot be downloaded ({shown(reason, 200)[1:-1]}).") from None
    return b"".join(parts)
