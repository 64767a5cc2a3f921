"""A thread that writes a checkpoint while training goes on, as torchtitan's `async_mode: async` does.

The state is copied to host memory first (`contents.capture`), so a written checkpoint is that of its step. At most one
is in flight. Nothing else differs from a save that training waits for: files, manifest, and the rename at the end.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from treewise.distributed import ranks


class BackgroundWriter:
    """Runs one save at a time in a thread. Every rank calls each method, at the same step."""

    def __init__(self) -> None:
        self._future: Future[Path] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the result of a save was not taken yet."""
        return self._future is not None

    def start(self, work: Callable[[], Path]) -> None:
        """Runs `work` in a thread."""
        assert self._future is None
        future: Future[Path] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._future = future
        # A daemon: a process that ends by an error of another one does not wait for a disk.
        threading.Thread(target=run, name="treewise-checkpoint", daemon=True).start()

    def is_done(self) -> bool:
        """Whether the save has ended on all ranks."""
        future = self._future
        return future is not None and all(ranks.on_every_rank(future.done))

    def result(self) -> Path:
        """Waits for the save; its checkpoint, or its error."""
        future, self._future = self._future, None
        assert future is not None
        return future.result()
