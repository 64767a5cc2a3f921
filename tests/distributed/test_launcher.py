"""Processes whose launcher is gone end themselves."""

import os
import signal
import threading
from itertools import chain, repeat

import pytest

from treewise.distributed import launcher
from treewise.distributed.signals import StopSignals

PARENT, OTHER = 4711, 1


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


def wait_for(condition, seconds):
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        threading.Event().wait(0.01)
    return False


def adopted(monkeypatch):
    """The launcher is there once, then it is gone."""
    parents = chain([PARENT], repeat(OTHER))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))


def test_a_process_whose_launcher_is_gone_is_asked_to_end(monkeypatch, capfd):
    adopted(monkeypatch)
    with StopSignals(may_abandon=False) as signals, launcher.ended_with_launcher(signals):
        assert wait_for(lambda: signals.received == signal.SIGTERM, 10)
    assert f"the launcher of this process ({PARENT}) is gone" in capfd.readouterr().err


def test_a_process_that_was_asked_already_gets_no_second_signal(monkeypatch, capfd):
    adopted(monkeypatch)
    with StopSignals(may_abandon=False) as signals:
        signals.received = signal.SIGINT  # a second signal would end this process here
        with launcher.ended_with_launcher(signals):
            assert wait_for(lambda: not is_watching(), 10)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("has_launcher", [True, False])
def test_others_are_left_alone(monkeypatch, has_launcher):
    if not has_launcher:  # a shell that is gone is none of ours
        adopted(monkeypatch)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with StopSignals(may_abandon=False) as signals:
        with launcher.ended_with_launcher(signals):
            assert is_watching() == has_launcher
            assert not wait_for(lambda: signals.received, 0.1)
        assert wait_for(lambda: not is_watching(), 10)


def is_watching():
    return any(each.name == "treewise-launcher" for each in threading.enumerate())
