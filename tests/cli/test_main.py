"""A command of two processes, of which one ends or stops while they start."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.cli import forked_starts


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
