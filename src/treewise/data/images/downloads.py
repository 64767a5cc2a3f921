"""Bytes at http and https addresses that records name, with limits on size, on time, and on where they lead.

Data come from others, who may name what only this machine can reach. So each host, that of a redirect as well, is
looked up once, every address that it has is checked, and the connection goes to the address that was checked.
"""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from treewise.base.addresses import client_settings
from treewise.data.io.field_checks import shown
from treewise.errors import ConfigError, DataError, pip_install

if TYPE_CHECKING:
    import httpx

MAX_SECONDS = 60.0
MAX_REDIRECTS = 5
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# Embed an IPv4 address in their last 32 bits: compatible and mapped ones, and those of NAT64 and of local networks.
_EMBEDDING = [ipaddress.IPv6Network(each) for each in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")]
_ISATAP = (0x00005EFE, 0x02005EFE)  # the third 32 bits; the last are an IPv4 address
# Where Azure, Alibaba, Oracle, AWS (for machines and pods), Google and Scaleway keep what only a machine of theirs may
# read; others use link-local ones. AWS and Google have all of a network for such services.
_OF_CLOUDS = [
    *(ipaddress.ip_network(each) for each in ("168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32")),
    *(ipaddress.ip_network(each) for each in ("fd00:ec2::/32", "fd20:ce::/32", "fd00:42::42/128")),
]
_SHARED = ipaddress.IPv4Network("100.64.0.0/10")  # of a provider's or an overlay network
_NEAR = "an address of this machine or its network"


def downloaded(address: str, location: str, max_bytes: int, *, allows_local: bool = False) -> bytes:
    """The bytes at an http or https address.

    allows_local: also of this machine and its private network, but not behind a redirect from outside of it. Link-local
    addresses, where clouds keep credentials, are never asked.

    Raises:
        DataError: another protocol, an answer without success, more than `max_bytes`, too much time, or an address that
            is not of the public network, also behind a redirect.
        ConfigError: httpx is not installed.
    """
    try:
        import httpx
    except ImportError:
        raise ConfigError(f"images_from_network needs httpx: {pip_install('httpx')}.") from None
    try:
        with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one, as in a notebook
            return thread.submit(asyncio.run, _within_time(address, max_bytes, allows_local)).result()
    except TimeoutError:
        reason = f"took more than {MAX_SECONDS:g} seconds"
    except _RefusedError as error:
        reason = str(error)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = f"cannot be downloaded ({shown(first, 200)[1:-1]})"
    raise DataError(f"{location}: {shown(address)} {reason}.")


class _RefusedError(Exception):
    """An answer that is not taken; the message follows the address."""


async def _within_time(address: str, max_bytes: int, allows_local: bool) -> bytes:
    """A limit on the whole exchange: timeouts of httpx begin anew with each byte that comes."""
    import httpx

    async with asyncio.timeout(MAX_SECONDS):
        url = httpx.URL(address)
        for redirects in range(MAX_REDIRECTS + 1):
            if url.scheme not in ("http", "https") or not url.host:
                raise httpx.UnsupportedProtocol(f"{url.scheme or 'no'} protocol or host; http and https are read")
            found = await _checked_addresses(url, allows_local, is_redirect=redirects > 0)
            allows_local = allows_local and any(why_refused(each, allows_local=False) for each in found)
            answer = await _asked(url, found, max_bytes)
            if isinstance(answer, bytes):
                return answer
            url = answer
    raise _RefusedError(f"was redirected more than {MAX_REDIRECTS} times")


async def _asked(url: "httpx.URL", addresses: list[Address], max_bytes: int) -> "bytes | httpx.URL":
    """The content, or where a redirect leads, from the first of the addresses that takes a connection.

    Each has a client of its own: one connection to an address is of one name, which its certificate has to bear.
    """
    import httpx

    for number, address in enumerate(addresses, 1):
        place = url.copy_with(host=str(address))
        try:
            async with (
                httpx.AsyncClient(**{**client_settings([str(place)], MAX_SECONDS), "timeout": None}) as client,
                client.stream(
                    "GET",
                    place,
                    headers={"Host": url.netloc.decode("ascii")},
                    extensions={"sni_hostname": url.raw_host.decode("ascii")},
                ) as answer,
            ):
                if answer.has_redirect_location:
                    return url.join(answer.headers["location"])
                return await _content(answer, max_bytes)
        except httpx.ConnectError:
            if number == len(addresses):
                raise
    raise httpx.ConnectError("the host has no address")


async def _content(answer: "httpx.Response", max_bytes: int) -> bytes:
    if not answer.is_success:
        raise _RefusedError(f"cannot be downloaded (status {answer.status_code} {answer.reason_phrase})")
    content = bytearray()
    async for part in answer.aiter_bytes():
        content += part
        if len(content) > max_bytes:
            raise _RefusedError(f"has more than {max_bytes:,} bytes (max_image_bytes); shrink the file")
    return bytes(content)


async def _checked_addresses(url: "httpx.URL", allows_local: bool, *, is_redirect: bool) -> list[Address]:
    """All addresses of the host, in the order in which the system prefers them."""
    found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(where[0]).partition("%")[0]) for *_, where in found]
    for address in addresses:
        if (why := why_refused(address, allows_local)) is not None:
            how = "was redirected to" if is_redirect else "is"
            raise _RefusedError(f"{how} {address}, {why}; not read")
    return list(dict.fromkeys(addresses))


def why_refused(address: Address, allows_local: bool) -> str | None:
    """Why an address is not asked; None for one that is. Of one that leads to addresses of IPv4 these count."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded(address)
        whys = [why for inner in embedded if (why := why_refused(inner, allows_local)) is not None]
        if whys or embedded:
            return whys[0] if whys else None
        if int(address) >> 32 & 0xFFFFFFFF in _ISATAP and (why := why_refused(_last_bits(address), allows_local)):
            return why
    is_site = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    is_of_cloud = any(address in network for network in _OF_CLOUDS)  # of the other version it is in none
    if is_of_cloud or address.is_multicast or address.is_link_local or address.is_unspecified:
        return _NEAR
    if address.is_loopback or is_site or address in _SHARED or (address.is_private and not address.is_reserved):
        return None if allows_local else f"{_NEAR} (images_from_local_network)"
    return None if address.is_global and not address.is_reserved else _NEAR


def _embedded(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The addresses of IPv4 to which one of IPv6 leads by its form."""
    if any(address in network for network in _EMBEDDING) and int(address) > 1:  # not `::` and `::1`
        return [_last_bits(address)]
    if address.sixtofour is not None:
        return [address.sixtofour]
    return list(address.teredo or ())


def _last_bits(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
