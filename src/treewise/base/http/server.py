"""How a server listens, and who may come in: this machine alone, or others that have its token."""

import hmac
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from treewise.base.addresses import LOOPBACK
from treewise.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn
    from starlette.middleware import Middleware


def check_host(host: str, token: str | None, form: str) -> None:
    """Raises `ConfigError` for a server that others can reach without a token. form: of a token, for the message."""
    if host not in LOOPBACK and token is None:
        raise ConfigError(f"host={host} can be reached from other machines: give --token {form}, or leave --host out.")


def host_guard(host: str) -> "Middleware":
    """Refuses requests for other names than this machine's own, as a page that a browser shows could send them to a
    server that listens on this machine alone.
    """
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    return Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, "[::1]"] if host in LOOPBACK else ["*"])


def is_token(given: str, token: str) -> bool:
    """Whether they are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode(), token.encode())


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `ConfigError` where the address is not free, or none of this machine."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"port {port} of {host} cannot be listened on: {error.strerror or error}.") from None


def url_of(own: socket.socket, host: str) -> str:
    """The address of a socket that listens, with the port that it was given."""
    return f"http://{f'[{host}]' if ':' in host else host}:{own.getsockname()[1]}"


def server_of(app: Any, on_start: Callable[[], object], **settings: Any) -> "uvicorn.Server":
    """A server of an ASGI application, to be run on a socket that listens. on_start: is called once it answers."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, access_log=False, ws="none", http="h11", **settings))
    startup = server.startup

    async def announced(*args: Any, **kwargs: Any) -> None:
        await startup(*args, **kwargs)
        on_start()

    server.startup = announced  # type: ignore[method-assign]
    return server


def serve_on(own: socket.socket, host: str, app: Any, **settings: Any) -> None:
    """Serves until a signal ends it; says where, as uvicorn does where it listens by itself."""

    def say() -> None:
        text = "Uvicorn running on %s (Press CTRL+C to quit)"
        logging.getLogger("uvicorn.error").info(text, url_of(own, host))

    server_of(app, say, **settings).run(sockets=[own])
