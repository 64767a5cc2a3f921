"""Files from network addresses, where the data's options allow them: limited in size, in time as a whole, and in where
a redirect may lead.
"""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from treewise.data.io.printable import shown
from treewise.errors import ConfigError, DataError, pip_install

if TYPE_CHECKING:
    import httpx

NETWORK = ("http:", "https:", "ftp:")  # how an address of another machine begins
MAX_SECONDS = 60.0
MAX_REDIRECTS = 5


def downloaded(address: str, location: str, max_bytes: int) -> bytes:
    """The bytes at an http or https address.

    Raises:
        DataError: another protocol, an answer without success, more than `max_bytes`, too much time, or a redirect to
            this machine or its network.
        ConfigError: httpx is not installed.
    """
    try:
        import httpx
    except ImportError:
        raise ConfigError(f"images_from_network needs httpx: {pip_install('httpx')}.") from None
    try:
        with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one, as in a notebook
            return thread.submit(asyncio.run, _within_time(address, max_bytes)).result()
    except TimeoutError:
        reason = f"took more than {MAX_SECONDS:g} seconds"
    except _RefusedError as error:
        reason = str(error)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = f"cannot be downloaded ({shown(first, 200)[1:-1]})"
    raise DataError(f"{location}: {shown(address)} {reason}.")


class _RefusedError(Exception):
    """An answer that is not taken; the message follows the address."""


async def _within_time(address: str, max_bytes: int) -> bytes:
    """A limit on the whole exchange: timeouts of httpx begin anew with each byte that comes."""
    import httpx

    async with asyncio.timeout(MAX_SECONDS), httpx.AsyncClient(timeout=None) as client:
        first = url = httpx.URL(address)
        for _ in range(MAX_REDIRECTS + 1):
            await _check_host(url, is_redirect=url.host != first.host)
            async with client.stream("GET", url) as answer:
                if answer.next_request is None:
                    return await _content(answer.raise_for_status(), max_bytes)
                url = answer.next_request.url
    raise _RefusedError(f"was redirected more than {MAX_REDIRECTS} times")


async def _content(answer: "httpx.Response", max_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in answer.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise _RefusedError(f"has more than {max_bytes:,} bytes (max_image_bytes); shrink the file")
    return b"".join(parts)


async def _check_host(url: "httpx.URL", *, is_redirect: bool) -> None:
    """Link-local addresses, where clouds keep credentials, are never asked; a redirect leads to no local one.

    Data come from others, and a server may answer one thing to them and another to this machine.
    """
    found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    for *_, where in found:
        host = ipaddress.ip_address(str(where[0]).partition("%")[0])
        if host.is_link_local or (is_redirect and not host.is_global):
            how = "was redirected to" if is_redirect else "is"
            raise _RefusedError(f"{how} {host}, an address of this machine or its network; not read")
