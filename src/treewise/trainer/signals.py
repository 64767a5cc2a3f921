"""SIGTERM, SIGINT, SIGHUP and SIGUSR1: a run is saved before it ends; only the step in progress is lost.

With one process the first signal abandons the current step, or the start, of which nothing is saved. Several processes
finish theirs, because all must end at the same step. A second SIGTERM or SIGINT ends the process at once; published
checkpoints stay. SIGHUP (a terminal that is closed) often comes twice, from the kernel and from the shell, and SIGUSR1
(a batch system shortly before a limit) may; repeated, they change nothing. Where SIGHUP is ignored, as under nohup, it
stays ignored. A scheduler that ends a job (`scancel`, preemption) signals all of its processes, and torchrun passes its
own signal on, so under torchrun one that follows at once is the same one.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from treewise.base import features
from treewise.base.progress import ERASE
from treewise.distributed import ranks

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
_ENDING_AT_ONCE = (signal.SIGTERM, signal.SIGINT)  # the second time
SECONDS_OF_ONE = 5.0  # in which signals that reach a process under torchrun twice are one
_HANGUP = getattr(signal, "SIGHUP", None)


class StepAbandoned(BaseException):
    """Unwinds a step whose gradients are dropped. Not an `Exception`, so that no `except Exception` catches it."""


class StopSignals:
    """Handles the signals while entered in the main thread; in other threads it leaves them alone.

    A process that torchrun started also sends itself SIGTERM when torchrun is gone (`launcher`).

    may_abandon: whether a step may be left before its end.
    """

    def __init__(self, *, may_abandon: bool) -> None:
        self.may_abandon = may_abandon
        self.received: int | None = None
        self._received_at = 0.0
        self._is_computing = self._is_starting = False
        self._launcher = ExitStack()
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self.received = None
        if threading.current_thread() is threading.main_thread():
            taken = [each for each in SIGNALS if each != _HANGUP or signal.getsignal(each) is not signal.SIG_IGN]
            self._previous_handlers = {each: signal.signal(each, self._handle) for each in taken}
        if "TORCHELASTIC_RUN_ID" in os.environ:  # which torchrun sets
            watch = features.launcher.WATCH
            self._launcher.enter_context(watch.answered(os.getppid(), self._end_without_launcher))
        return self

    def __exit__(self, *_: object) -> None:
        self._launcher.close()
        for each, handler in self._previous_handlers.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
        self._previous_handlers, self._is_starting = {}, False

    def start(self) -> None:
        """Until the first work that can be abandoned is over, nothing has to be saved: a signal raises `StepAbandoned`
        wherever it comes, where steps may be abandoned.
        """
        self._is_starting = self.may_abandon

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Marks work that can be abandoned at any moment, because nothing that it changes is saved then.

        Raises:
            StepAbandoned: a signal came before or during the work, and `may_abandon` holds.
        """
        self._is_computing = True
        try:
            if self.may_abandon and self.received is not None:
                raise StepAbandoned
            yield
        finally:
            self._is_computing = self._is_starting = False

    def _handle(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            is_passed_on = "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() < self._received_at + SECONDS_OF_ONE
            if number not in _ENDING_AT_ONCE or is_passed_on:
                return
            _print(f"{name} again: ending at once, without saving")
            os._exit(128 + number)
        self.received, self._received_at = number, time.monotonic()
        how = "abandoning the step and saving" if self.may_abandon else "finishing the step and saving"
        _print(f"{name}: {'ending' if self._is_starting else how}; again to end at once")
        if self._is_starting or (self._is_computing and self.may_abandon):
            self._is_computing = self._is_starting = False
            raise StepAbandoned

    def _end_without_launcher(self) -> None:
        if self.received is None:  # a second signal would end this process without saving
            os.kill(os.getpid(), signal.SIGTERM)


def stop_of_all(signals: StopSignals) -> bool:
    """Whether any rank has received a signal to stop; all ranks call this at the same step; then all hold it."""
    if signals.may_abandon:  # of one process
        return signals.received is not None
    numbers = ranks.on_every_rank(lambda: signals.received)
    signals.received = next((number for number in numbers if number is not None), None)
    return signals.received is not None


class StepEnd(TrainerCallback):
    """After each step: calls `end_step`, and stops all ranks if any of them has received a signal. A resumed run logs,
    evaluates and saves by its own settings and not by those in the checkpoint."""

    def __init__(self, signals: StopSignals, end_step: Callable[[], None]) -> None:
        self._signals, self._end_step = signals, end_step

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        state.compute_steps(args, state.max_steps)

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
        erased = ERASE if os.isatty(2) else ""  # a line of progress
        os.write(2, f"{erased}treewise: {line}\n".encode())  # a signal handler may run inside a print
