"""What is printed while a command works, by a clock of the test."""

import io
import sys
import threading

import pytest

from treewise.base.progress import ERASE, busy_with, listeners, tell_progress
from treewise.cli import waiting
from treewise.cli.waiting import NoticingStream, Printer, Waiting, telling


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def told(clock):
    """Listens as a command does."""
    listener = Waiting("treewise train", clock)
    listeners.append(listener)
    yield listener
    listeners.remove(listener)


def test_until_something_begins_the_command_loads_packages(told, clock):
    clock.now += 7
    assert told.line() == "treewise train: loading packages, 0:07"
    with busy_with("reading data"):
        pass
    assert told.line() == "treewise train, 0:07"


def test_a_step_of_two_batches_counts_the_tokens_of_both(told, clock):
    with busy_with("step 3", 400):
        assert told.line() == "step 3, 0 of 400 tokens in 0:00"
        tell_progress("forward and backward", 0, 100)
        clock.now += 10
        tell_progress("forward and backward", 50, 100)
        assert told.line() == "step 3: forward and backward, 50 of 400 tokens in 0:10, about 1:10 left"
        clock.now += 5  # inside a micro-batch: counts down
        assert told.line() == "step 3: forward and backward, 50 of 400 tokens in 0:15, about 1:05 left"
        tell_progress("forward and backward", 100, 100)
        tell_progress("forward and backward", 0, 300)
        clock.now += 5
        tell_progress("forward and backward", 60, 300)
        assert told.line() == "step 3: forward and backward, 160 of 400 tokens in 0:20, about 0:30 left"


def test_what_took_longer_than_expected_is_not_about_to_end(told, clock):
    with busy_with("step 3", 400):
        tell_progress("forward and backward", 0, 400)
        clock.now += 10
        tell_progress("forward and backward", 200, 400)
        clock.now += 9
        assert told.line() == "step 3: forward and backward, 200 of 400 tokens in 0:19, about 0:01 left"
        for spent in ("0:20", "0:21"):
            clock.now += 1
            assert told.line() == f"step 3: forward and backward, 200 of 400 tokens in {spent}"


def test_work_that_ended_is_not_reported_again(told, clock):
    """A step of fine-tuning was, half a minute into the benchmark after it."""
    with busy_with("step 8", 100):
        tell_progress("forward and backward", 100, 100)
    clock.now += 43
    assert told.line() == "treewise train, 0:43"
    tell_progress("forward and backward", 50, 100)  # of a walk that nobody announced
    assert told.line() == "treewise train, 0:43"


def test_work_ends_whatever_ends_it(told, clock):
    with pytest.raises(ValueError, match="a reason"), busy_with("step 8", 100), busy_with("saving"):
        raise ValueError("a reason")
    assert told.line() == "treewise train, 0:00"


def test_log_probs_before_the_loss_are_counted_apart(told, clock):
    with busy_with("step 1", 200):
        for _ in range(2):
            for part in ("forward", "forward and backward"):
                tell_progress(part, 0, 100)
                clock.now += 1
                tell_progress(part, 100, 100)
        assert told.line() == "step 1: forward and backward, 200 of 200 tokens in 0:04"


def test_before_its_first_micro_batch_a_step_takes_as_long_as_the_one_before(told, clock):
    with busy_with("step 9", 100):
        tell_progress("forward and backward", 0, 100)
        clock.now += 20
        tell_progress("forward and backward", 100, 100)
    with busy_with("step 10", 300):
        tell_progress("forward and backward", 0, 300)
        clock.now += 6
        assert told.line() == "step 10: forward and backward, 0 of 300 tokens in 0:06, about 0:54 left"


def test_work_within_a_step_leaves_its_counts_alone(told, clock):
    with busy_with("step 1", 100):
        with busy_with("measuring the budget"):
            tell_progress("forward and backward", 0, 256)
            tell_progress("forward and backward", 256, 256)
            clock.now += 3
            assert told.line() == "measuring the budget: forward and backward, 256 of 256 tokens in 0:03"
        assert told.line() == "step 1, 0 of 100 tokens in 0:03"


def test_other_threads_work_beside_it(told):
    def work():
        with busy_with("sampling"):
            tell_progress("sampling", 5, 10)

    with busy_with("step 1", 100):
        beside = threading.Thread(target=work)
        beside.start()
        beside.join()
        assert told.line() == "step 1, 0 of 100 tokens in 0:00"


def test_what_nobody_can_count_to_its_end(told, clock):
    with busy_with("reading data"):
        assert told.line() == "reading data, 0:00"
        tell_progress("reading data", 1200, None, "record")
        clock.now += 2
        assert told.line() == "reading data, 1,200 records in 0:02"


def test_a_log_gets_a_line_at_the_start_and_then_for_each_thirty_seconds_of_silence(told, clock):
    log = io.StringIO()
    printer = Printer(told, log)
    out = NoticingStream(io.StringIO(), printer)
    clock.now += 0.9
    printer.print_if_due()
    assert log.getvalue() == ""
    clock.now += 0.1
    printer.print_if_due()
    printer.print_if_due()
    assert log.getvalue() == "treewise train: loading packages, 0:01\n"
    clock.now += 29
    printer.print_if_due()
    out.write("step 1/3\n")
    clock.now += 29
    printer.print_if_due()
    assert log.getvalue().count("\n") == 1
    with busy_with("step 2", 100):
        clock.now += 1
        printer.print_if_due()
        clock.now += 30
        printer.print_if_due()
    assert log.getvalue().splitlines()[1:] == ["step 2, 0 of 100 tokens in 0:01", "step 2, 0 of 100 tokens in 0:31"]


def test_a_command_that_starts_within_a_second_says_nothing_of_it(told, clock):
    log = io.StringIO()
    printer = Printer(told, log)
    with busy_with("reading data"):
        clock.now += 20
        printer.print_if_due()
    assert log.getvalue() == ""


def test_a_terminal_has_one_line_that_makes_room(told, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    printer = Printer(told, terminal)
    with busy_with("loading \x1b[31m" + "m" * 60):
        for seconds in (1, 1):
            clock.now += seconds
            printer.print_if_due()
    first, second = (f"loading ?[31m{'m' * 19}…, 0:0{seconds}" for seconds in (1, 2))
    assert len(first) == 39
    assert terminal.getvalue() == f"{ERASE}{first}{ERASE}{second}"
    out = NoticingStream(terminal, printer)
    out.write("step 1/3\n")
    out.write("step 2/3\n")
    assert terminal.getvalue().endswith(f"{second}{ERASE}step 1/3\nstep 2/3\n")


def test_a_command_that_takes_long_says_so_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(waiting, "SECONDS_OF_A_LOG", 0.0)
    before = sys.stdout, sys.stderr
    with telling("inspect"):
        (listener,) = listeners
        with busy_with("reading data"):
            printer = Printer(listener, sys.stderr)
            printer.print_if_due()
            sys.stdout.write("{}\n")
    assert (sys.stdout, sys.stderr) == before
    assert listeners == []
    out, err = capsys.readouterr()
    assert out == "{}\n"
    assert "reading data, 0:00" in err


def test_a_command_within_another_one_is_not_told_twice():
    with telling("agent-demo"):
        (outer,) = listeners
        with telling("rl"):
            assert listeners == [outer]
        assert listeners == [outer]


def test_a_stream_that_is_gone_ends_no_command(told):
    class Gone(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    printer = Printer(told, Gone())
    printer.start()
    printer.end()


def test_one_rank_speaks_for_all(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with telling("train"):
        assert listeners == []
