"""SIGTERM, SIGINT, SIGHUP and SIGUSR1: a run is saved before it ends; only the step in progress is lost.

With one process the first signal abandons the current step. Several processes finish theirs, because all must end at
the same step. A second SIGTERM or SIGINT ends the process at once; published checkpoints stay. SIGHUP (a terminal that
is closed) often comes twice, from the kernel and from the shell, and SIGUSR1 (a batch system shortly before a limit)
may; repeated, they change nothing. Where SIGHUP is ignored, as under nohup, it stays ignored.

torchrun and accelerate pass SIGTERM on to their workers, and end the others when one fails. They do nothing when they
are killed themselves: their workers get another parent and train on. So a worker polls for its parent.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from treewise.distributed import ranks

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
_ENDING_AT_ONCE = (signal.SIGTERM, signal.SIGINT)  # the second time
_HANGUP = getattr(signal, "SIGHUP", None)
POLL_SECONDS = 1.0


class StepAbandoned(BaseException):
    """Unwinds a step whose gradients are dropped. Not an `Exception`, so that no `except Exception` catches it."""


class StopSignals:
    """Handles the signals while entered in the main thread; in other threads it leaves them alone.

    A process that torchrun started also sends itself SIGTERM when torchrun is gone.

    may_abandon: whether a step may be left before its end.
    """

    def __init__(self, *, may_abandon: bool) -> None:
        self.may_abandon = may_abandon
        self.received: int | None = None
        self._is_computing = False
        self._is_over = threading.Event()
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self.received = None
        self._is_over = threading.Event()
        if threading.current_thread() is threading.main_thread():
            taken = [each for each in SIGNALS if each != _HANGUP or signal.getsignal(each) is not signal.SIG_IGN]
            self._previous_handlers = {each: signal.signal(each, self._handle) for each in taken}
        if "TORCHELASTIC_RUN_ID" in os.environ:  # set by torchrun, and by accelerate, which runs it
            target, arguments = self._end_with_launcher, (os.getppid(), self._is_over)
            threading.Thread(target=target, args=arguments, name="treewise-launcher", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for each, handler in self._previous_handlers.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
        self._previous_handlers = {}

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Marks work that changes no parameter and can therefore be abandoned at any moment.

        Raises:
            StepAbandoned: a signal came before or during the work, and `may_abandon` holds.
        """
        self._is_computing = True
        try:
            if self.may_abandon and self.received is not None:
                raise StepAbandoned
            yield
        finally:
            self._is_computing = False

    def _handle(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            if number not in _ENDING_AT_ONCE:
                return
            _print(f"{name} again: ending at once, without saving")
            os._exit(128 + number)
        self.received = number
        how = "abandoning the step" if self.may_abandon else "finishing the step"
        _print(f"{name}: {how} and saving; again to end at once")
        if self._is_computing and self.may_abandon:
            self._is_computing = False
            raise StepAbandoned

    def _end_with_launcher(self, launcher: int, is_over: threading.Event) -> None:
        while os.getppid() == launcher:
            if is_over.wait(POLL_SECONDS):
                return
        if self.received is None:  # a second signal would end this process without saving
            _print(f"the launcher of this process ({launcher}) is gone: saving, and ending")
            os.kill(os.getpid(), signal.SIGTERM)


def stop_of_all(signals: StopSignals) -> bool:
    """Whether any rank has received a signal to stop; all ranks call this at the same step; then all hold it."""
    if signals.may_abandon:  # of one process
        return signals.received is not None
    numbers = ranks.on_every_rank(lambda: signals.received)
    signals.received = next((number for number in numbers if number is not None), None)
    return signals.received is not None


class StepEnd(TrainerCallback):
    """After each step: calls `end_step`, and stops all ranks if any of them has received a signal."""

    def __init__(self, signals: StopSignals, end_step: Callable[[], None]) -> None:
        self._signals, self._end_step = signals, end_step

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._end_step()
        if stop_of_all(self._signals):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False


def _print(line: str) -> None:
    with suppress(OSError):  # the terminal is gone
        os.write(2, f"treewise: {line}\n".encode())  # a signal handler may run inside a print
