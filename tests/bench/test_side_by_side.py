"""Results come as they are made; a process that dies, hangs or is out of time costs its own piece of work alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from treewise.bench.side_by_side import Died, side_by_side

ROOT = Path(__file__).parents[2]
FOREVER = time.perf_counter() + 1e6


def work(name: str) -> str:
    """What the processes do, each of which imports this module."""
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "exits":
        os._exit(7)
    if name == "hangs":
        signal.pause()
    return f"{name} by {os.getpid()}"


def test_results_come_from_others_and_a_death_costs_one() -> None:
    found = dict(side_by_side(work, ["a", "dies", "b", "exits", "c"], 2, FOREVER))
    assert found["dies"] == Died(-signal.SIGKILL)
    assert found["exits"] == Died(7)
    by = {str(found[name]).removeprefix(f"{name} by ") for name in "abc"}
    assert str(os.getpid()) not in by


def test_what_hangs_holds_up_nothing_else_and_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until all else is done, and then it is too late."""
    clock = [0.0]
    monkeypatch.setattr("treewise.bench.side_by_side.perf_counter", lambda: clock[0])
    found = []
    for name, _ in side_by_side(work, ["hangs", "a", "b"], 2, 1e6):
        found.append(name)
        clock[0] = 1e6 if len(found) == 2 else 0.0
    assert found == ["a", "b"]


def test_without_time_nothing_begins() -> None:
    assert list(side_by_side(work, ["a"], 2, time.perf_counter() - 1)) == []


GROUP = """
import os, signal, sys, time
from tests.bench.test_side_by_side import FOREVER, side_by_side, work

class Terminated(BaseException): pass
def stop(*_): raise Terminated

signal.signal(signal.SIGTERM, stop)
try:
    for name, found in side_by_side(work, ["a", "hangs"], 2, FOREVER):
        print(found, flush=True)
        os.killpg(0, signal.SIGTERM)
except Terminated:
    print("terminated")
"""


def test_a_signal_to_the_whole_group_is_of_who_waits() -> None:
    """As `timeout` and batch systems send it: the processes at work do not seem to have died."""
    run = subprocess.run(
        [sys.executable, "-c", GROUP], capture_output=True, text=True, start_new_session=True, cwd=ROOT
    )
    assert run.stdout.splitlines()[1:] == ["terminated"], run.stderr
    assert run.stdout.startswith("a by ")


def test_who_stops_listening_ends_all() -> None:
    results = side_by_side(work, ["a", "hangs"], 2, FOREVER)
    assert next(results)[0] == "a"
    results.close()
