"""Chat templates are rendered in a process of their own, which has limits of time and memory: a template is a program
from others, and no list of what Jinja offers bounds what each filter and operator may take.

One process serves this one, and is started with the first template. It is small (`template_program.py`), so a start
takes a tenth of a second. Whatever it does, it ends when a conversation takes too long or too much.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MAX_SECONDS = 10.0  # of one conversation
MAX_BYTES = 2**30  # of the process
START_SECONDS = 120.0  # that it may take to start, where packages lie on a slow disk
LOOK_SECONDS = 0.05  # between two looks at its memory
PROGRAM = Path(__file__).with_name("template_program.py")


class RenderingError(Exception):
    """A template went beyond a limit, or ended what renders it; the message follows its name."""


class _EndedError(Exception):
    """The process has ended by itself."""


def ask(request: str, num_answers: int) -> list[dict[str, Any]]:
    """The answers of the process to a request, which is JSON text; fewer where the last is an error.

    Raises:
        RenderingError: the template goes beyond a limit; the next request is answered as any.
    """
    with _lock:
        for is_last in (False, True):  # what ended between two requests is started again
            try:
                return _asked(request, num_answers)
            except _EndedError as error:
                if is_last:
                    raise RenderingError(str(error)) from None
            except BaseException:
                end()
                raise
    raise AssertionError


def _asked(request: str, num_answers: int) -> list[dict[str, Any]]:
    process, answers = _started(), list[dict[str, Any]]()
    body = request.encode()
    try:
        _send(process, len(body).to_bytes(8, "big") + body)
    except BrokenPipeError:
        raise _EndedError(_last_words()) from None
    while len(answers) < num_answers and not (answers and "text" not in answers[-1]):
        answers.append(_Waiting(process, MAX_SECONDS).answer())
        if "limit" in answers[-1]:
            raise RenderingError(answers[-1]["limit"])
    return answers


def _send(process: "subprocess.Popen[bytes]", body: bytes) -> None:
    assert process.stdin is not None
    rest = memoryview(body)
    while rest:
        rest = rest[process.stdin.write(rest) :]


class _Waiting:
    """Waits for an answer. Time in which this process itself did not run is not counted: it may have been stopped."""

    def __init__(self, process: "subprocess.Popen[bytes]", max_seconds: float) -> None:
        self.process, self.seconds, self.max_seconds = process, 0.0, max_seconds
        assert process.stdout is not None
        self.file = process.stdout.fileno()
        self.poll = select.poll()
        self.poll.register(self.file, select.POLLIN | select.POLLHUP)

    def answer(self) -> Any:
        """What the process says next, as plain values."""
        size = int.from_bytes(self._read(8), "big")
        return json.loads(self._read(size).decode("utf-8", "surrogatepass"))

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._wait()
            part = os.read(self.file, min(size - len(parts), 2**20))
            if not part:
                raise _EndedError(_last_words())
            parts += part
        return bytes(parts)

    def _wait(self) -> None:
        look = time.monotonic()
        while not self.poll.poll(LOOK_SECONDS * 1000):
            now = time.monotonic()
            self.seconds += min(now - look, 2 * LOOK_SECONDS)
            look = now
            if self.seconds > self.max_seconds:
                raise RenderingError(f"takes more than {self.max_seconds:g} seconds")
            if _num_bytes(self.process.pid) > MAX_BYTES:
                raise RenderingError(f"takes more than {MAX_BYTES / 2**30:g} GiB of memory")


def _num_bytes(pid: int) -> int:
    """The memory of the process; 0 once it has ended."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _command() -> list[str]:
    """Python without its site's packages, which take longer to find than all that the program does."""
    folders = {str(Path(str(spec.origin)).parents[1]) for name in ("jinja2", "markupsafe") if (spec := find_spec(name))}
    return [sys.executable, "-I", "-S", str(PROGRAM), str(MAX_SECONDS), str(MAX_BYTES), *sorted(folders)]


_process: "subprocess.Popen[bytes] | None" = None
_lock = threading.RLock()


def _started() -> "subprocess.Popen[bytes]":
    global _process
    if _process is None:
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            _process = subprocess.Popen(_command(), bufsize=0, stdin=pipe, stdout=pipe, stderr=nowhere)
        except OSError as error:
            raise RenderingError(f"cannot be rendered by {sys.executable} ({error.strerror})") from None
        _Waiting(_process, START_SECONDS).answer()
    return _process


def _last_words() -> str:
    """Why the process has ended, for a message; it is gone afterwards."""
    ended = _process
    assert ended is not None
    with suppress(subprocess.TimeoutExpired):
        ended.wait(LOOK_SECONDS)
    end()
    if ended.returncode > 0:  # an error of Python's: it shows again where nothing is asked
        said = subprocess.run(_command(), input=b"", capture_output=True, check=False).stderr.decode(errors="replace")
        return f"cannot be rendered by {sys.executable}: {' '.join(said.split())[-300:] or ended.returncode}"
    return f"ends the process that renders it (signal {-ended.returncode})"


def end() -> None:
    """Ends the process, whatever it does; the next request starts another."""
    global _process
    ended, _process = _process, None
    if ended is None:
        return
    ended.stdin.close()  # type: ignore[union-attr]
    ended.stdout.close()  # type: ignore[union-attr]
    ended.kill()
    ended.wait()


def _forget() -> None:
    """In a process that was forked: what it would ask answers its parent."""
    global _process, _lock
    _process, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)
atexit.register(end)
