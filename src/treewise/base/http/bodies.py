"""Bodies of requests, within limits of bytes and of time: of each one, and of all that are under way at once.

What is refused is read to its end and dropped, or its sender would not hear why; so a body that does not end is
answered when its time is over, and holds no memory until then.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.requests import Request

IDLE_SECONDS = 20.0  # without a byte
_RETRY_SECONDS = 40.0  # within which the SDK sends again what broke off
_SMALL = 1 << 14  # bytes of each body that are not counted: heartbeats go through whatever else is under way
_KEYS = 256  # whose broken bodies are remembered
KEPT_ENDS = 1 << 13  # bytes that are kept of a body's beginning and end where it is refused


class BodyRefusedError(HTTPException):
    """A body that was not kept. ends: its beginning and its end."""

    ends = b""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """In MB of one body and of all that are under way, and in seconds until a body is there."""

    max_request_mb: int
    max_uploads_mb: int = 256
    max_request_seconds: float = 120


@dataclass(slots=True)
class _Body:
    """One that is under way. num_counted: its bytes in memory but for the first `_SMALL`."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    num_counted: int = 0
    is_whole: bool = False


class Bodies:
    """Those of one server; one event loop calls it. num_bytes: that are counted now."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits, self.num_bytes = limits, 0
        self._under_way = Counter[str]()  # large bodies of each key
        self._broken: dict[str, float] = {}  # until when each key may send one again that did not come to its end

    def uploaded(self, key: str) -> float:
        """Until when bodies of a key that are not small are on their way, as `time.monotonic` counts."""
        return math.inf if self._under_way[key] else self._broken.get(key, 0.0)

    @asynccontextmanager
    async def read(self, request: Request, key: str, refusal: HTTPException | None) -> AsyncIterator[bytes]:
        """A whole body, which counts as under way until the block ends. key: who sends it. refusal: of the request,
        raised once its body has been read.

        Raises:
            BodyRefusedError: 413, it is too large; 408, it takes too long; 503, too many bytes are under way; 415, it
                is compressed.
        """
        body, tail = _Body(), b""
        if refusal is None and request.headers.get("content-encoding", "identity") != "identity":
            refusal = BodyRefusedError(415, "compressed requests are not taken.")
        try:
            async for part in self._parts(request):
                self._under_way[key] += body.size <= _SMALL < body.size + len(part)
                body.size += len(part)
                refusal = refusal or self._kept(body, part)
                if refusal is not None:
                    self._drop(body)
                    tail = (tail + part)[-KEPT_ENDS:]
            if isinstance(refusal, BodyRefusedError):
                refusal.ends += tail
            body.is_whole = refusal is None or refusal.status_code != 503
            if refusal is not None:
                raise refusal
            content = b"".join(body.parts)
            body.parts.clear()
            yield content
        finally:
            self._drop(body)
            if body.size > _SMALL:
                self._end(key, is_whole=body.is_whole)

    async def _parts(self, request: Request) -> AsyncIterator[bytes]:
        ends, stream = time.monotonic() + self._limits.max_request_seconds, request.stream()
        while True:
            try:
                async with asyncio.timeout(min(IDLE_SECONDS, ends - time.monotonic())):
                    part = await anext(stream, None)
            except TimeoutError:
                raise BodyRefusedError(
                    408,
                    f"the body was not there in {self._limits.max_request_seconds} s (max_request_seconds), or "
                    f"nothing of it came for {IDLE_SECONDS:.0f} s.",
                ) from None
            if part is None:
                return
            yield part

    def _kept(self, body: _Body, part: bytes) -> BodyRefusedError | None:
        """Takes a part; the reason where it cannot be taken."""
        body.parts.append(part)
        before, body.num_counted = body.num_counted, max(body.size - _SMALL, 0)
        self.num_bytes += body.num_counted - before
        if body.size > self._limits.max_request_mb << 20:
            text = f"the request is larger than {self._limits.max_request_mb} MB (max_request_mb)."
            refusal = BodyRefusedError(413, text)
            refusal.ends = _beginning(body.parts)
            return refusal
        at_once = max(self._limits.max_uploads_mb, self._limits.max_request_mb)
        if body.num_counted and self.num_bytes > at_once << 20:
            text = f"{at_once} MB of requests are under way (max_uploads_mb); send it again later."
            return BodyRefusedError(503, text)
        return None

    def _drop(self, body: _Body) -> None:
        self.num_bytes -= body.num_counted
        body.num_counted = 0
        body.parts.clear()

    def _end(self, key: str, *, is_whole: bool) -> None:
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]
        if not is_whole:
            self._broken.pop(key, None)
            self._broken[key] = time.monotonic() + _RETRY_SECONDS
            if len(self._broken) > _KEYS:
                del self._broken[next(iter(self._broken))]


def _beginning(parts: list[bytes]) -> bytes:
    found = b""
    for part in parts:
        found += part[: KEPT_ENDS - len(found)]
    return found
