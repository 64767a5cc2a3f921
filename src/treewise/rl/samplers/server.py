"""One server: where it is, and calls to it, which are tried again while it is away or busy."""

import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from treewise.data.io.field_checks import printable
from treewise.errors import SamplerError

logger = logging.getLogger("treewise")

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
TELL_SECONDS, TELL_AGAIN_SECONDS = 5.0, 60.0  # until a server that does not answer is named, and between two lines
LOOK_SECONDS = 5.0  # for what a server answers at once
MAX_SLEEP = 0.5  # seconds between two looks whether anybody waits


class Server:
    """One server: where it is, calls to it, and whether it may have lost the weights that it was given.

    url: with or without `/v1`. patience_seconds: how long a call is tried again while the server is away or busy.
    """

    def __init__(self, url: str, client: Any, patience_seconds: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.lock = threading.Lock()
        self.was_away = False
        self.num_trees = 0
        self._client = client
        self.patience_seconds = patience_seconds
        self._told = -math.inf  # when it was named last
        self._telling = threading.Lock()

    def call(
        self,
        path: str,
        payload: Any = None,
        *,
        retried: Sequence[int] = RETRIED,
        before: Callable[[], None] | None = None,
        is_over: Callable[[], bool] = bool,
    ) -> Any:
        """The answer's JSON (its text, where it is none) to a POST of `payload`, or to a GET where there is none.

        Parameters:
            retried: statuses after which the same call may succeed; a lost connection is always tried again.
            before: is called before each try.
            is_over: whether nobody waits for the answer any more.

        Raises:
            SamplerError: the server refuses, or does not answer for `patience_seconds`; or nobody waits.
        """
        import httpx

        began, delay = time.monotonic(), min(0.5, self.patience_seconds / 8)
        while True:
            try:
                if before is not None:
                    before()
                return self._once(path, payload)
            except httpx.HTTPStatusError as error:
                status, waited = error.response.status_code, time.monotonic() - began
                why = f"the server answers {status}: {printable(error.response.text[:300])}"
                if status not in retried or waited > self.patience_seconds:
                    refusal = SamplerError(f"{self.url}{path}: {why}")
                    refusal.status = status
                    raise refusal from error
            except httpx.TransportError as error:
                waited = time.monotonic() - began
                why = f"no answer ({type(error).__name__}: {printable(error)})"
                if waited > self.patience_seconds:
                    away = SamplerError(f"{self.url}{path}: {why} for {self.patience_seconds:g} s.")
                    away.is_away = True
                    raise away from error
            pause = random.uniform(0.0, delay)  # not all of them at once
            if waited + pause >= TELL_SECONDS:
                self._tell(why, began, waited)
            while pause > 0:
                time.sleep(min(pause, MAX_SLEEP))
                pause -= MAX_SLEEP
                if is_over():
                    raise SamplerError(f"{self.url}{path}: {why}, and nobody waits for it any more.")
            delay = min(2 * delay, 10.0)

    def _tell(self, why: str, began: float, waited: float) -> None:
        """Names a server that lets calls wait, once for all of them, and from time to time after that."""
        with self._telling:
            if began + waited < self._told + TELL_AGAIN_SECONDS:
                return
            self._told = began + waited
        logger.warning("%s: %s; it is asked again for %g s (patience_seconds)", self.url, why, self.patience_seconds)

    def start(self) -> str | None:
        """What tells one start of the server from another: the time of its start, out of vLLM's metrics. None where it
        does not say.
        """
        try:
            lines = str(self.call("/metrics")).splitlines()
        except SamplerError:
            return None
        return next((line.split()[1] for line in lines if line.startswith("process_start_time_seconds ")), None)

    def dtype(self) -> str | None:
        """In which vLLM computes, as torch names it; None where it does not say."""
        try:
            found = re.search(r"\bdtype=torch\.(\w+)", str(self.call("/server_info")))
        except SamplerError:
            return None
        return None if found is None else found[1]

    def has(self, path: str) -> bool:
        """Whether it has a call: one without its fields is refused there, and not found elsewhere."""
        try:
            self.call(path, {}, retried=())
        except SamplerError as error:
            return error.status not in (404, 405)
        return True

    def _once(self, path: str, payload: Any) -> Any:
        import httpx

        try:
            if payload is None:
                response = self._client.get(self.url + path, timeout=LOOK_SECONDS)
            else:
                response = self._client.post(self.url + path, json=payload)
        except httpx.TransportError:
            self.was_away = True
            raise
        response.raise_for_status()
        try:
            return response.json()
        except ValueError:
            return response.text
