"""Errors that a run explains end a job of several processes at once; deaths are restarted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from treewise.cli import gave_up
from treewise.cli.main import main

# Killed in its first attempt; in the second it trains, which is to say that it ends.
DIES = """
import os, signal, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Two processes, which may begin three times more."""
    own = ("--nproc_per_node", "2", "--max_restarts", "3", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0")
    environment = {**os.environ, gave_up.VARIABLE: str(folder / "gave-up"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "treewise.cli.launch.torchrun", *own, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_an_error_that_is_explained_ends_all_attempts_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\ndata: rows.jsonl\nlearning_rat: 1\noutput_dir: out\n")
    done = torchrun(tmp_path, "-m", "treewise", "train", "run.yaml", "--resume")
    assert done.returncode == gave_up.EXPLAINED, done.stderr
    # By each of both processes of the first attempt, or by the faster alone; never again.
    assert 1 <= done.stderr.count("unknown key 'learning_rat'") <= 2
    assert "Traceback" not in done.stderr.rpartition("learning_rat")[2]


def test_a_death_is_restarted(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    done = torchrun(tmp_path, "dies.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 1") == 2


def test_what_another_process_gave_up_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(gave_up.VARIABLE, str(tmp_path / "gave-up"))
    assert main(["train", str(tmp_path / "none.yaml")]) == gave_up.EXPLAINED
    assert "none.yaml" in capsys.readouterr().err
    assert main(["--version"]) == gave_up.EXPLAINED  # whatever it is
    assert capsys.readouterr() == ("", "")
