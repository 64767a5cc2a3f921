"""What a command prints while it works, so that none leaves its user in doubt.

    step 3: forward and backward, 12,288 of 110,026 tokens in 0:41, about 5:20 left

On a terminal it is one line from the first second of silence on, which is written anew and goes away. A log file gets
one line where the command takes more than a second to start, and then one for every thirty seconds in which nothing
else was printed. Both on stderr, from a thread of their own: torch may work for minutes in one call.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from treewise.base.progress import ERASE, listeners
from treewise.cli.output import is_first_rank
from treewise.errors import duration, num

SECONDS = 1.0  # in which nothing was printed: on a terminal, and before a command has begun its work
SECONDS_OF_A_LOG = 30.0
LOADING = "loading packages"  # what a command does before its first work: torch and transformers take seconds


class WorkProgress:
    """Some work, and how much of it is done.

    Parameters:
        total: what all of its walks add up to; None where nobody knows how many there are.
    """

    def __init__(self, what: str, total: int | None, now: float) -> None:
        self._what, self._total, self._began, self._at = what, total, now, now
        self._part, self._unit, self._done, self._of = "", "token", 0, 0
        self._finished = dict[str, int]()  # by part: what its earlier walks did

    def reaches(self, part: str, done: int, of: int | None, unit: str, now: float) -> None:
        """Takes how far a part of the work is, as `tell_progress` tells it. now: of the clock."""
        if part != self._part or done < self._done:  # another part, or the next walk
            if self._total is None:
                self._began = now
            else:
                self._finished[self._part] = self._finished.get(self._part, 0) + self._of
        self._part, self._unit, self._done, self._of, self._at = part, unit, done, of or 0, now

    @property
    def kind(self) -> tuple[str, str]:
        return self._what.rstrip("0123456789,"), self._part  # steps differ by their number

    def reached(self) -> tuple[int, int]:
        """How much is done of how much; of 0 where nobody counts."""
        before = self._finished.get(self._part, 0)
        return before + self._done, max(self._total or 0, before + self._of)

    @property
    def speed(self) -> float | None:
        """Units per second, until the last that is done; None before the first."""
        done, spent = self.reached()[0], self._at - self._began
        return done / spent if done and spent > 0 else None

    def line(self, now: float, speed: float | None) -> tuple[str, str]:
        """What is being done; and how much of how much, since when, and how long it is going to take, unless that is
        over.

        speed: of earlier work of this kind.
        """
        spent, (done, of) = now - self._began, self.reached()
        head = self._what if self._part in ("", self._what) else f"{self._what}: {self._part}"
        if not of:
            counted = f", {num(done, self._unit)} in" if done else ","
            return head, f"{counted} {duration(spent)}"
        counted, speed = f", {done:,} of {num(of, self._unit)} in {duration(spent)}", self.speed or speed
        left = of / speed - spent if speed and done < of else 0.0
        return head, f"{counted}, about {duration(left)} left" if left >= 1 else counted


class Waiting:
    """What is being done, the innermost last, and when something was printed last: a `Listener` to the thread that made
    it. Others work beside it.

    Parameters:
        what: the command, which loads packages until something begins or is printed.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last, self._thread = clock, clock(), threading.get_ident()
        self.is_loading = True
        self._command = WorkProgress(what, None, self._last)
        self._works = list[WorkProgress]()
        self._speeds = dict[tuple[str, str], float]()  # of finished work by its kind

    def begins(self, what: str, total: int | None) -> WorkProgress | None:
        if not self._listens:
            return None
        self.is_loading = False
        self._works = [*self._works, WorkProgress(what, total, self._clock())]
        return self._works[-1]

    def ends(self, work: object) -> None:
        self._works = [each for each in self._works if each is not work]

    def reaches(self, what: str, done: int, total: int | None, unit: str) -> None:
        if not self._listens or not self._works:
            return
        work = self._works[-1]
        work.reaches(what, done, total, unit, self._clock())
        reached, of = work.reached()
        if work.speed is not None and reached == of:
            self._speeds[work.kind] = work.speed

    @property
    def _listens(self) -> bool:
        return threading.get_ident() == self._thread

    @property
    def seconds_silent(self) -> float:
        """Seconds since something was printed."""
        return self._clock() - self._last

    def printed(self) -> None:
        """Begins to count the seconds of silence anew."""
        self._last = self._clock()

    def line(self, width: int | None = None) -> str:
        """Of what is being done now; within a width how far it is comes before what it is."""
        work = (self._works or [self._command])[-1]
        head, rest = work.line(self._clock(), self._speeds.get(work.kind))
        if self.is_loading:
            head += f": {LOADING}"
        if width is not None and len(head) + len(rest) > width:
            head = f"{head[: max(0, width - len(rest) - 1)]}…"
        return "".join(char if char.isprintable() else "?" for char in f"{head}{rest}"[:width])  # names hold anything


class NoticingStream:
    """A stream that takes away the line of a terminal before anything else is written, and notices when that is."""

    def __init__(self, stream: Any, thread: "Printer") -> None:
        self._stream, self._thread = stream, thread

    def write(self, text: str) -> Any:
        self._thread.make_room()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Printer(threading.Thread):
    """Prints the line where nothing else was printed for a while."""

    def __init__(self, waiting: Waiting, stream: Any) -> None:
        super().__init__(name="treewise-waiting", daemon=True)
        self._waiting, self._stream = waiting, stream
        self._is_terminal = bool(getattr(stream, "isatty", bool)())
        self._is_shown = False
        self._seconds = SECONDS  # of silence, before the next line
        self._lock, self._over = threading.RLock(), threading.Event()

    def run(self) -> None:
        with suppress(OSError, ValueError):  # whoever read it is gone
            while not self._over.wait(min(SECONDS, self._seconds) / 2):
                with self._lock:
                    self.print_if_due()

    def print_if_due(self) -> None:
        """Prints the line where nothing was printed for long enough."""
        if not self._waiting.is_loading and not self._is_terminal:
            self._seconds = SECONDS_OF_A_LOG
        if self._waiting.seconds_silent < self._seconds:
            return
        if self._is_terminal:
            self._stream.write(f"{ERASE}{self._waiting.line(shutil.get_terminal_size().columns - 1)}")
            self._is_shown = True
        else:
            self._stream.write(f"{self._waiting.line()}\n")
            self._seconds = SECONDS_OF_A_LOG
        self._stream.flush()
        self._waiting.printed()

    def make_room(self) -> None:
        """Before something else is printed."""
        with self._lock:
            self._waiting.is_loading = False
            self._waiting.printed()
            if self._is_shown:
                self._is_shown = False
                with suppress(OSError, ValueError):
                    self._stream.write(ERASE)
                    self._stream.flush()

    def end(self) -> None:
        self._over.set()
        self.join()
        self.make_room()


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Around a command, or the one that it is part of: says on stderr what takes long. what: the command."""
    if not is_first_rank() or any(isinstance(each, Waiting) for each in listeners):
        yield
        return
    waiting, before = Waiting(f"treewise {what}"), (sys.stdout, sys.stderr)
    thread = Printer(waiting, sys.stderr)
    sys.stdout, sys.stderr = NoticingStream(before[0], thread), NoticingStream(before[1], thread)
    listeners.append(waiting)
    thread.start()
    try:
        yield
    finally:
        listeners.remove(waiting)
        thread.end()
        sys.stdout, sys.stderr = before
