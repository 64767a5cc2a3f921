"""A run whose launcher was killed is saved and ends, where it would train on unseen and keep its folder.

torchrun and accelerate end their processes when they are told to end. When they are killed, nobody tells the processes;
they only get another parent.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from treewise.distributed.signals import StopSignals

POLL_SECONDS = 1.0


@contextmanager
def ended_with_launcher(signals: StopSignals) -> Iterator[None]:
    """Inside, this process is sent SIGTERM once its launcher is gone; one without a launcher is left alone."""
    is_over = threading.Event()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun, which accelerate runs, too
        arguments = (os.getppid(), signals, is_over)
        threading.Thread(target=_watch, args=arguments, name="treewise-launcher", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _watch(launcher: int, signals: StopSignals, is_over: threading.Event) -> None:
    while os.getppid() == launcher:
        if is_over.wait(POLL_SECONDS):
            return
    if signals.received is None:  # else another process was first; a second signal would end this one at once
        sys.stderr.write(f"treewise: the launcher of this process ({launcher}) is gone: saving, and ending\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)
