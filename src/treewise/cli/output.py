"""Output of a run: which process prints, and a reader that may leave (`| head`, a terminal) while training goes on."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CLOSED = (errno.EPIPE, errno.EIO)  # of a pipe; of a terminal


class EnduringStream:
    """A text stream that writes into nothing once its pipe or terminal is closed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes; the first write after the pipe or terminal was closed sends all further output to the null device."""
        try:
            self._stream.write(text)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            self._leave()
        return len(text)

    def flush(self) -> None:
        """Flushes the stream; of one that is closed as `write`."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            self._leave()

    def _leave(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # what is buffered goes there, too
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def enduring_output() -> Iterator[None]:
    """Inside, a closed stdout or stderr does not end the process; afterwards it stays on the null device."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = EnduringStream(before[0]), EnduringStream(before[1])
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def is_first_rank() -> bool:
    """Whether this process prints for the run."""
    return os.environ.get("RANK", "0") == "0"
