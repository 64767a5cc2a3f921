"""The launcher of this process: torchrun, or accelerate, which runs it.

It passes SIGTERM on to its workers, and ends the others when one fails. It does nothing when it is killed itself: its
workers get another parent and train on, or wait for one another in a store that is gone. So a worker polls for its
parent: a command from its beginning, a trainer that is used without one for as long as it runs.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

POLL_SECONDS = 1.0


class LauncherWatch:
    """A thread that answers once when the launcher is gone.

    answer: what is done then. Without a run that is saved first, SIGTERM ends this process.
    """

    def __init__(self) -> None:
        self.answer: Callable[[], object] = end_by_signal
        self._is_on = False

    @contextmanager
    def watching(self, launcher: int) -> Iterator[None]:
        """Watches, unless this process does already. launcher: its process id."""
        if self._is_on:
            yield
            return
        is_over = threading.Event()
        threading.Thread(target=self._poll, args=(launcher, is_over), name="treewise-launcher", daemon=True).start()
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            is_over.set()

    @contextmanager
    def answered(self, launcher: int, answer: Callable[[], object]) -> Iterator[None]:
        """Watches, and answers so."""
        before, self.answer = self.answer, answer
        try:
            with self.watching(launcher):
                yield
        finally:
            self.answer = before

    def _poll(self, launcher: int, is_over: threading.Event) -> None:
        while os.getppid() == launcher:
            if is_over.wait(POLL_SECONDS):
                return
        with suppress(OSError):  # the terminal is gone
            os.write(2, f"treewise: the launcher of this process ({launcher}) is gone: ending\n".encode())
        self.answer()


def end_by_signal() -> None:
    """Ends this process as the launcher would have."""
    os.kill(os.getpid(), signal.SIGTERM)


WATCH = LauncherWatch()
