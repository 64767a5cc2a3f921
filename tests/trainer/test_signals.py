"""Signals of a run, and workers whose launcher is gone."""

import os
import signal
import threading
from itertools import chain, repeat

import pytest

from tests.trainer.helpers import in_child
from treewise.distributed import launcher
from treewise.trainer import signals as signals_of_runs
from treewise.trainer.signals import SIGNALS, StepAbandoned, StopSignals

PARENT, OTHER = 4711, 1


@pytest.fixture(autouse=True)
def _hangups_are_not_ignored():
    """They are where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


def wait_for(condition, seconds):
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        threading.Event().wait(0.01)
    return False


def is_watching():
    return any(each.name == "treewise-launcher" for each in threading.enumerate())


def adopted(monkeypatch):
    """The launcher is there once, then it is gone."""
    parents = chain([PARENT], repeat(OTHER))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_abandons_computing_and_nothing_else(number):
    with StopSignals(may_abandon=True) as signals:
        os.kill(os.getpid(), number)  # outside of computing: noted
        assert signals.received == number
        with pytest.raises(StepAbandoned), signals.computing():
            raise AssertionError("computed although a signal was received")
    with StopSignals(may_abandon=True) as signals, pytest.raises(StepAbandoned), signals.computing():
        os.kill(os.getpid(), number)


def test_a_signal_ends_the_start_wherever_it_comes(capfd):
    """Nothing has to be saved until the first work that may be abandoned is over."""
    with StopSignals(may_abandon=True) as signals:
        signals.start()
        with pytest.raises(StepAbandoned):
            os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err == "treewise: SIGTERM: ending; again to end at once\n"
    with StopSignals(may_abandon=True) as signals:
        signals.start()
        with signals.computing():
            pass
        os.kill(os.getpid(), signal.SIGTERM)  # as an optimizer step, which is finished
        assert signals.received == signal.SIGTERM
    with StopSignals(may_abandon=False) as signals:  # several processes end together
        signals.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM


def test_where_steps_may_not_be_abandoned_they_are_finished():
    with StopSignals(may_abandon=False) as signals:
        with signals.computing():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM


def test_handlers_are_restored_and_a_signal_is_forgotten_by_the_next_run():
    before = [signal.getsignal(each) for each in SIGNALS]
    signals = StopSignals(may_abandon=False)
    with signals:
        os.kill(os.getpid(), signal.SIGTERM)
    assert before == [signal.getsignal(each) for each in SIGNALS]
    with signals:
        assert signals.received is None


def test_a_second_signal_ends_the_process_at_once():
    def twice():
        with StopSignals(may_abandon=False):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    _, status = os.waitpid(in_child(twice), 0)
    assert os.WEXITSTATUS(status) == 128 + signal.SIGTERM


@pytest.mark.parametrize(("seconds", "expected"), [(60.0, 0), (0.0, 128 + signal.SIGTERM)])
def test_a_signal_of_all_processes_that_torchrun_passes_on_too_is_one(monkeypatch, seconds, expected):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(signals_of_runs, "SECONDS_OF_ONE", seconds)

    def twice():
        with StopSignals(may_abandon=False):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    _, status = os.waitpid(in_child(twice), 0)
    assert os.WEXITSTATUS(status) == expected


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_signals_that_come_twice_by_themselves_end_nothing(number):
    with StopSignals(may_abandon=False) as signals:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert signals.received == number


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopSignals(may_abandon=False) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_whose_launcher_is_gone_sends_itself_a_signal(launched, monkeypatch, capfd):
    adopted(monkeypatch)
    with StopSignals(may_abandon=False) as signals:
        assert wait_for(lambda: signals.received == signal.SIGTERM, 10)
    assert f"the launcher of this process ({PARENT}) is gone" in capfd.readouterr().err


def test_a_process_that_has_a_signal_already_gets_no_second_one(launched, monkeypatch, capfd):
    monkeypatch.setattr(os, "getppid", lambda: PARENT)
    with StopSignals(may_abandon=False) as signals:
        signals.received = signal.SIGINT  # a second signal would end this process here
        monkeypatch.setattr(os, "getppid", lambda: OTHER)
        assert wait_for(lambda: not is_watching(), 10)
    assert "launcher" in capfd.readouterr().err


def test_a_command_is_watched_from_its_beginning_and_a_run_in_it_answers(launched, monkeypatch):
    """Before the run, where its processes wait for one another, nothing is there to be saved."""

    def work():
        with launcher.WATCH.watching(PARENT):
            threading.Event().wait(30)

    monkeypatch.setattr(os, "getppid", lambda: OTHER)
    assert os.WTERMSIG(os.waitpid(in_child(work), 0)[1]) == signal.SIGTERM
    monkeypatch.setattr(os, "getppid", lambda: PARENT)
    with launcher.WATCH.watching(PARENT), StopSignals(may_abandon=False) as signals:
        assert len([each for each in threading.enumerate() if each.name == "treewise-launcher"]) == 1
        monkeypatch.setattr(os, "getppid", lambda: OTHER)
        assert wait_for(lambda: signals.received == signal.SIGTERM, 10)


@pytest.mark.parametrize("has_launcher", [True, False])
def test_other_processes_are_left_alone(launched, monkeypatch, has_launcher):
    if not has_launcher:  # the shell that started a process may end before it
        adopted(monkeypatch)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with StopSignals(may_abandon=False) as signals:
        assert is_watching() == has_launcher
        assert not wait_for(lambda: signals.received, 0.1)
    assert wait_for(lambda: not is_watching(), 10)
