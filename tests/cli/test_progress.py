"""The line of a step, from its log."""

import json
from functools import partial

import pytest
from transformers import TrainerState

from tests.damage import damages
from treewise.cli.progress import StepLines, duration, step_line
from treewise.cli.run_folder import LOG
from treewise.errors import ConfigError, num

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


def test_damaged_lines_of_the_log_are_left_out_with_a_line(tmp_path, capsys):
    log = tmp_path / LOG
    log.write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in range(1, 6)))
    state = TrainerState(global_step=4, max_steps=5)
    begin = partial(StepLines(tmp_path).on_train_begin, None, state, None)
    begin()
    kept = log.read_text()
    assert kept.count("\n") == 4
    for how in damages(log):
        if log.is_dir():
            with pytest.raises(ConfigError, match=r"cannot be read .Is a directory.; move it away"):
                begin()
            continue
        content = log.read_bytes()
        begin()
        lines = content.decode(errors="replace").splitlines()
        damaged = [line for line in lines if not is_entry(line)]
        expected = len(damaged) - (bool(lines) and not is_entry(lines[-1]))  # the last as by a kill
        err = capsys.readouterr().err
        found = f"{log}: {num(expected, 'line')} of it damaged, and left out\n" if expected else ""
        assert err == found, how
        assert all(line in content.decode(errors="replace") for line in log.read_text().splitlines())


def is_entry(line):
    try:
        return isinstance(float(json.loads(line)["step"]), float)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
