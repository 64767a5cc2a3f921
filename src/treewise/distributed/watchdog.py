"""When one process of a run dies, the others print the reason and end within seconds.

What others do: torchrun ends the workers of its own host when one of them fails, by SIGTERM, which a run answers by
finishing its step, and by SIGKILL after 30 s. gloo raises an error when a connection closes. A collective of NCCL, and
one whose partner hangs, waits until its timeout, ten minutes or more. None of them names the reason on other hosts.

So every process has a connection to rank 0, read by a thread. A process that fails sends its reason first; the
connection of a killed one closes. Rank 0 informs the others. Every rank then has 2 s to fail by itself and is otherwise
terminated with exit code 3.

A process that hangs closes nothing. Collectives of the others end at their timeout (`ddp_timeout`); then each process
is asked where it is, and one that is stopped does not answer.
"""

import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch import distributed

from treewise.distributed import ranks
from treewise.errors import LostRankError, StoppedError, TreewiseError

logger = logging.getLogger("treewise")

GRACE_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_REASON_SECONDS = 0.5
_ANSWER_SECONDS = 2.0


class Watchdog:
    """Watches the other processes while entered; does nothing in a run of one process."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}  # rank -> connection
        self._is_over, self._has_reason = threading.Event(), threading.Event()
        self._own_end: str | None = None
        self._answers: dict[int, str] = {}  # rank -> the line that it is at

    def __enter__(self) -> "Watchdog":
        if ranks.count() > 1:
            self._connect()
            if self._sockets:
                threading.Thread(target=self._listen, name="treewise-watch", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A signal stops all ranks at the same step; that is not a failure.
        is_failure = error is not None and not isinstance(error, StoppedError)
        self._own_end = f"{type(error).__name__}: {error}" if is_failure else None
        message = {"rank": ranks.own(), "end": self._own_end}
        self._is_over.set()
        for connection in self._sockets.values():
            _send(connection, message)
        if error is not None and self._sockets:
            # A collective operation fails before the reason of the process that died has arrived.
            self._has_reason.wait(_REASON_SECONDS)
        # The connections stay open until the process ends: a closed one counts as a death.

    # -- errors of collective operations --------------------------------------------------------------------------

    @contextmanager
    def explaining(self, timeout_seconds: float) -> Iterator[None]:
        """Turns errors of collective operations into errors that name what happened and what to do.

        Raises:
            LostRankError: another process is gone, or did not answer within `timeout_seconds`.
        """
        try:
            yield
        except RuntimeError as error:
            if ranks.count() == 1 or isinstance(error, TreewiseError) or not _is_of_collective(error):
                raise
            if "timed out" not in str(error).lower() and "timeout" not in str(error).lower():
                raise LostRankError(
                    f"rank {ranks.own()} lost the connection to another process, which prints the reason if it can; "
                    "go on with --resume. Checkpoints are untouched."
                ) from error
            where = self._roll_call()
            raise LostRankError(
                f"rank {ranks.own()} waited {timeout_seconds:g} s (ddp_timeout) for another process. {where} "
                "End all of them and go on with --resume; checkpoints are untouched. Raise ddp_timeout if a step or a "
                "save may take that long."
            ) from error

    def _roll_call(self) -> str:
        """Asks the connected processes for the line that they are at; a sentence for each."""
        self._answers = {}
        for connection in self._sockets.values():
            _send(connection, {"ask": True})
        until = time.monotonic() + _ANSWER_SECONDS
        while len(self._answers) < len(self._sockets) and time.monotonic() < until:
            time.sleep(0.05)
        silent = sorted(set(self._sockets) - set(self._answers))
        lines = [f"Rank {rank} does not answer: it is stopped or stuck, or its machine is gone." for rank in silent]
        return " ".join(lines + [f"Rank {rank} is at {where}." for rank, where in sorted(self._answers.items())])

    # -- connections ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        server: socket.socket | None = None
        if ranks.own() == 0:
            is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
            server = socket.create_server(("127.0.0.1" if is_one_host else "", 0), backlog=ranks.count())
        where: list[Any] = [None]
        if server is not None:
            hosts = ["127.0.0.1", os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
            where = [(hosts, server.getsockname()[1], secrets.token_hex(16))]
        distributed.broadcast_object_list(where, src=0)
        hosts, port, token = where[0]
        if server is not None:
            self._accept(server, token)
        else:
            self._call(hosts, port, token)

    def _accept(self, server: socket.socket, token: str) -> None:
        until = time.monotonic() + _CONNECT_SECONDS
        with server:
            while len(self._sockets) < ranks.count() - 1 and time.monotonic() < until:
                server.settimeout(max(0.1, until - time.monotonic()))
                try:
                    connection, _ = server.accept()
                    connection.settimeout(_CONNECT_SECONDS)
                    hello = json.loads(_line(connection))
                    if hello["token"] != token:
                        raise ValueError("not a process of this run")
                    _send(connection, {})
                except (OSError, ValueError, KeyError, TypeError):
                    continue
                connection.settimeout(None)
                self._sockets[int(hello["rank"])] = connection
        missing = sorted(set(range(1, ranks.count())) - set(self._sockets))
        if missing:
            logger.warning("ranks %s could not be reached: if one dies, the others end by a timeout only", missing)

    def _call(self, hosts: list[str], port: int, token: str) -> None:
        for host in filter(None, hosts):
            try:
                connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
                connection.sendall(json.dumps({"rank": ranks.own(), "token": token}).encode() + b"\n")
                _line(connection)
            except OSError:
                continue
            connection.settimeout(None)
            self._sockets[0] = connection
            return

    # -- the thread -----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    try:
                        message = json.loads(_line(key.fileobj))
                    except (OSError, ValueError):
                        message = {"rank": key.data, "end": "its process was gone (killed?)"}
                    if "ask" in message:
                        _send(key.fileobj, {"rank": ranks.own(), "at": _current_line()})
                    elif "at" in message:
                        self._answers[int(message["rank"])] = str(message["at"])
                    else:
                        selector.unregister(key.fileobj)
                        if message["end"] is not None:
                            self._spread(message)

    def _spread(self, message: dict[str, Any]) -> None:
        for rank, connection in self._sockets.items():
            if ranks.own() == 0 and rank != message["rank"]:
                _send(connection, message)
        if message["end"] != self._own_end:  # else all ranks fail alike, and print it themselves
            reason = f"rank {message['rank']} failed: {message['end']}"
            sys.stderr.write(f"treewise: {reason}; rank {ranks.own()} ends, too\n")
            sys.stderr.flush()
        self._has_reason.set()
        if not self._is_over.wait(GRACE_SECONDS):  # else this process is leaving by itself
            os._exit(LostRankError.exit_code)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one line of JSON. Errors are ignored: the reader of the connection notices that it is closed."""
    with suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _line(connection: socket.socket) -> bytes:
    """One line. Raises `ConnectionError` if the connection closes before its end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("closed")
        line += byte
    return bytes(line)


def _is_of_collective(error: RuntimeError) -> bool:
    """Whether NCCL or gloo raised it; errors of gloo have no type of their own, but name its source files."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error).lower()


def _current_line() -> str:
    """The line that the main thread is at: the innermost one of treewise, else of any module."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost: FrameType | None = frame
    while frame is not None and f"{os.sep}treewise{os.sep}" not in frame.f_code.co_filename:
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "its end"
