"""SIGTERM and SIGINT: a run is saved before it ends, and nothing is lost but the step at hand.

The first signal abandons the step where one process trains alone; several processes finish theirs, because they must
all end at the same one. A second signal ends the process at once; what was published stays.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StepAbandoned(BaseException):
    """Unwinds a step whose gradients are to be dropped. Not an `Exception`: nobody's `except` may keep it."""


class StopSignals:
    """Handles the signals while it is entered, in the main thread; elsewhere they are left alone.

    may_abandon: whether a step may be left in its middle.
    """

    def __init__(self, may_abandon: bool) -> None:
        self.may_abandon = may_abandon
        self.received: int | None = None
        self._is_computing = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._handle) for each in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Work that changes no parameter, and so may be left at any moment."""
        self._leave_if_asked()
        self._is_computing = True
        try:
            self._leave_if_asked()
            yield
        finally:
            self._is_computing = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            _say(f"{name} again: ending at once, without saving")
            os._exit(128 + number)
        self.received = number
        how = "abandoning the step" if self.may_abandon else "finishing the step"
        _say(f"{name}: {how} and saving; again to end at once")
        if self._is_computing:
            self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        if self.may_abandon and self.received is not None:
            self._is_computing = False
            raise StepAbandoned


def _say(line: str) -> None:
    os.write(2, f"treewise: {line}\n".encode())  # a handler may run inside a print
