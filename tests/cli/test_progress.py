"""The line of a step, from its log."""

import pytest

from treewise.cli.progress import duration, step_line

LOGS = {
    "loss": 1.87312,
    "grad_norm": 2.3,
    "learning_rate": 9e-6,
    "tokens_per_second_tree": 270.4,
    "memory_bytes": 0.7 * 2**30,
    "epoch": 0.1,
}


def test_a_line_shows_what_one_watches():
    line = step_line(LOGS, 3, 50, 40.2)
    assert line == "step 3/50  loss 1.873  |g| 2.3  lr 9e-06  270 tok/s  0.70 GiB  ETA 0:40"


def test_what_is_not_logged_is_left_out():
    assert step_line({"loss": 2.0, "kl": 0.0123}, 50, 50, 0.0) == "step 50/50  loss 2  kl 0.0123"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (40, "0:40"), (725, "12:05"), (11220, "3:07:00")])
def test_durations(seconds, text):
    assert duration(seconds) == text
