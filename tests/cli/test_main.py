"""How a command ends: by an error, by a signal, and where one of two processes ends or stops while they start."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import forked_starts
from treewise import errors
from treewise.cli.main import explained

ENDED = """
import os, signal, sys
from treewise.cli.main import explained

def work():
    print("what was measured")
    if pid := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)  # the fork first, which ends without a line
    return 0

sys.exit(explained("bench", work))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sigterm_ends_a_command_with_a_line_and_what_it_printed():
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == "what was measured\n"
    assert done.stderr.splitlines()[-1] == "treewise bench: ended by SIGTERM"
    assert done.stderr.count("ended by") == 1


SWALLOWED = """
import signal, sys, threading
from treewise.cli import main

def work():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:  # as some packages do while they are imported
        threading.Event().wait(300)
    return 0

main.SECONDS_TO_END = 0.01
sys.exit(main.explained("rl", work))
"""


def test_an_interruption_that_a_package_swallows_ends_a_command_all_the_same():
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.splitlines()[-1] == "interrupted"


LOADING = """
import signal
from treewise.cli.main import loading

with loading("demo"):
    signal.raise_signal(signal.{name})
"""


@pytest.mark.parametrize(("name", "line"), [("SIGINT", "interrupted"), ("SIGTERM", "treewise demo: ended by SIGTERM")])
def test_an_example_that_still_imports_ends_as_a_command_does(name, line):
    code = LOADING.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 128 + getattr(signal, name)
    assert done.stderr == f"{line}\n"


def test_examples_import_what_is_slow_inside_of_loading():
    for name in ("demo", "online_rl", "agent_demo"):
        tree = ast.parse((Path(__file__).parents[2] / "examples" / f"{name}.py").read_text())
        top = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
        top += [each.name for node in tree.body if isinstance(node, ast.Import) for each in node.names]
        slow = {each for each in top if each.split(".")[0] not in sys.stdlib_module_names} - {"treewise.cli.main"}
        assert not slow, name


def test_a_command_that_is_over_leaves_signals_as_they_were():
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    assert explained("inspect", lambda: 7) == 7
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def test_an_interruption_is_a_line_and_nothing_is_left_of_it(capsys):
    def work():
        signal.raise_signal(signal.SIGINT)

    assert explained("inspect", work) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.ConfigError("no such key"), 2, "error: no such key\n"),
        (errors.VerificationError("they differ"), 1, "error: they differ\n"),
        (OSError(28, "No space left on device", "runs/demo"), 2, "error: runs/demo: No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_are_messages_and_exit_codes(error, code, line, capsys, monkeypatch):
    monkeypatch.delenv("TREEWISE_DEBUG", raising=False)

    def work():
        raise error

    assert explained("demo", work) == code
    assert capsys.readouterr().err == line


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_killed_or_stopped_while_it_starts_ends_the_other_one_which_names_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", forked_starts.__file__, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 2 * (forked_starts.NUM_MOMENTS + 1)
    wrong = {}
    for name, each in found.items():
        assert each["own"] == -signal.SIGKILL, name  # it came to its moment
        (said,) = each["said"]
        lines = [line for line in said.splitlines() if re.match("(error|treewise): ", line)]
        about = f"(?i)rank {each['rank']} (does not answer|failed|to start|while they started|for .*: it is stopped)"
        is_named = len(lines) == 1 and re.search(about, lines[0])
        if each["codes"] != [3] or not is_named or "Traceback" in said:  # -14: the alarm ended it
            wrong[name] = (each["at"], each["codes"], said[-2000:])
    assert not wrong
