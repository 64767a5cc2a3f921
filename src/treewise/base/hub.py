"""Whether the Hugging Face Hub can be reached, found out in seconds: its client tries again for a minute.

Asked once for a name that is no folder; what is in the Hub's cache is then read without asking anybody.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from treewise.errors import ConfigError

SECONDS = 4.0  # for one address; names have twice this time
FORGET_SECONDS = 60.0
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_PORTS = {"https": 443, "http": 80}
_found: tuple[float, str | None] | None = None  # when it was last asked, and why it cannot be reached


def why_unreachable() -> str | None:
    """Why the Hub (`HF_ENDPOINT`) or the proxy before it does not answer; None where it does, or must not be asked."""
    global _found
    if any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in OFFLINE):
        return None  # its client says so at once
    if _found is not None and (_found[1] is None or time.monotonic() - _found[0] < FORGET_SECONDS):
        return _found[1]
    reasons: list[str | None] = []
    asking = threading.Thread(target=lambda: reasons.append(_reason()), daemon=True)  # a resolver may wait for long
    asking.start()
    asking.join(2 * SECONDS)
    _found = time.monotonic(), reasons[0] if reasons else f"no answer in {2 * SECONDS:g} seconds"
    return _found[1]


def _reason() -> str | None:
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    try:
        if proxy and not proxy_bypass(address.netloc):
            address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        if address.hostname is None:
            return None  # its client says what is wrong
        port = address.port or _PORTS.get(address.scheme, 80)
        socket.create_connection((address.hostname, port), timeout=SECONDS).close()
    except (OSError, ValueError) as error:
        return f"{address.hostname}: {getattr(error, 'strerror', None) or error}"
    return None


def reachable(name: str) -> str:
    """The name of a model or data set of the Hub as it can be read: itself, or without a network its cached folder.

    Raises:
        ConfigError: the Hub cannot be reached, and its cache does not hold the name.
    """
    reason = why_unreachable()
    if reason is None:
        return name
    from huggingface_hub import snapshot_download

    try:
        return str(Path(snapshot_download(name, local_files_only=True)))
    except Exception:  # of several kinds, for a name that is not there or can be none
        raise ConfigError(
            f"{name}: no such folder, not in the Hub's cache, and the network does not lead to the Hub ({reason}). "
            "Give a folder, or download it where there is a network."
        ) from None


@contextmanager
def asking_nobody(modules: Any) -> Iterator[None]:
    """Inside, clients of the Hub read their caches alone.

    modules: that hold whether they are offline, as `HF_HUB_OFFLINE`.
    """
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
