"""Addresses of servers: which are this machine's own, and how they are reached."""

import ipaddress
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CONNECT_SECONDS = 5.0  # for a connection, after which a server is named that does not take one


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its own address; `0.0.0.0` and `::` lead there, too."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def client_settings(urls: Iterable[str], seconds: float) -> dict[str, Any]:
    """What clients of httpx for these addresses are made with: this machine is never reached through a proxy, whatever
    HTTP_PROXY and ALL_PROXY say, and a server that takes no connection is known after `CONNECT_SECONDS`.

    seconds: of an exchange.
    """
    import httpx

    hosts = {urlsplit(url).hostname or "" for url in urls}
    own = {host for host in hosts if is_loopback(host)}
    timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
    if own == hosts:  # where nothing is reached through a proxy, none has to be understood
        return {"timeout": timeout, "trust_env": False}
    return {"timeout": timeout, "mounts": {f"all://{f'[{host}]' if ':' in host else host}": None for host in own}}
