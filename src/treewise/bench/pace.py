"""Seconds of a workload: how many are left by what was measured, and who would take longer than are left."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch

from treewise.nn.device import synchronized_clock

# Of a step that is made of rows, after each: its number from 1, their number, and the part of the tokens that is done.
OnPart = Callable[[int, int, float], None]
REFERENCE = "the reference"
REFERENCE_SHARE = 0.25  # of all seconds, that the gradients which errors are measured against may take
CHECKPOINTED = 4 / 3  # of the seconds without checkpointing: a forward more


class TooSlow(Exception):
    """A step that would take longer than is left; the message says how long."""


@dataclass(slots=True)
class Pace:
    """Of one workload. num_tokens: that each contestant computes in a step. on_line: gets a line for each measurement.

    seconds: of the last step of each that was measured. What is left has room for a timed step of each of these.
    leaves_out: whether a contestant that would take longer than is left is left out.
    """

    max_seconds: float = math.inf
    num_tokens: Mapping[str, int] = field(default_factory=dict)
    on_line: Callable[[str], None] = lambda _: None
    seconds: dict[str, float] = field(default_factory=dict)
    leaves_out: bool = True
    _begun: float = field(default_factory=lambda: perf_counter())
    _first_step: tuple[str, torch.device, float] | None = None  # the one that runs now: whose, where, since when
    _last: tuple[float, float] = (0.0, 0.0)  # when the last part ended, and what was done then

    @property
    def elapsed(self) -> float:
        """Seconds since the workload began."""
        return perf_counter() - self._begun

    @property
    def left(self) -> float:
        """Seconds for contestants that have not begun."""
        return self.max_seconds - self.elapsed - sum(self.seconds.values())

    def refusal(self, name: str) -> str | None:
        """Why a contestant is left out before it begins: two steps of it, by the fastest rate that was measured, take
        longer than is left. None where nothing is known, or all fits."""
        known = {each: self.seconds[each] / self.num_tokens[each] for each in self.seconds if each in self.num_tokens}
        if not known or name not in self.num_tokens or not self._leaves_out(name):
            return None
        fastest = min(known, key=lambda each: known[each])
        step = known[fastest] * self.num_tokens[name] * (CHECKPOINTED if name.endswith("-ckpt") else 1.0)
        if 2 * step <= self.left:
            return None
        return f"left out: a step would take some {_text(step)} by what {fastest} took, {self._what_is_left(self.left)}"

    @contextmanager
    def first_step(self, name: str, device: torch.device) -> Iterator[None]:
        """Around the step that warms up a contestant, or around the reference's."""
        begun = synchronized_clock(device)
        self._first_step, self._last = (name, device, begun), (begun, 0.0)
        try:
            yield
        finally:
            self._first_step = None

    def part(self, number: int, total: int, done: float) -> None:
        """Raises `TooSlow` where the rest of a first step, by its latest part, and a timed step after it take longer
        than is left. One part alone is believed if it took half of that: it may hold what is done once.
        """
        if self._first_step is None or number == total or not self._leaves_out(self._first_step[0]):
            return
        name, device, begun = self._first_step
        now = synchronized_clock(device)
        rate = (now - self._last[0]) / max(done - self._last[1], 1e-9)
        self._last = (now, done)
        taken = now - begun
        left = self.left + taken
        is_reference = name == REFERENCE
        allowed = min(left, REFERENCE_SHARE * self.max_seconds) if is_reference else left
        step = taken + rate * (1 - done)
        if step + (0 if is_reference else rate) > allowed and (number > 1 or taken > allowed / 2):
            raise TooSlow(
                f"left out: a step would take some {_text(step)} ({number} of its {total} rows took {_text(taken)}), "
                f"{self._what_is_left(allowed)}"
            )

    def end(self, name: str, seconds: float, what: str, following: Sequence[str], waiting: int = 0) -> None:
        """A step was measured. following: whose steps follow, out of those that were measured. waiting: contestants
        that have not begun, whose seconds are unknown."""
        self.seconds[name] = seconds
        left = sum(self.seconds.get(each, 0.0) for each in following)
        left = min(left, max(0.0, self.max_seconds - self.elapsed))
        others = f", and {waiting} more to begin" if waiting else ""
        self.on_line(f"{name}: {what} {_text(seconds)}; some {_text(left)} left{others}")

    def has_time_for_a_round(self) -> bool:
        """Whether another step of each that was measured fits."""
        return self.elapsed + sum(self.seconds.values()) <= self.max_seconds

    def _leaves_out(self, name: str) -> bool:
        """Whether somebody may be left out; without a reference errors are against the first contestant."""
        return self.max_seconds < math.inf and (self.leaves_out or name == REFERENCE)

    def _what_is_left(self, seconds: float) -> str:
        return f"and {_text(max(0.0, seconds))} of its {_text(self.max_seconds)} are left (--max_seconds)"


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
