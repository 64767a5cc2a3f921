"""`treewise launch` prints a job, or hands it to the scheduler that is there."""

import errno
import os
import stat
from pathlib import Path

import pytest

from tests.cli.launch.helpers import ONLINE, TRAIN
from treewise.cli.main import main
from treewise.errors import ConfigError, DiskError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, and a PATH on which there is no scheduler but those that are put into `bin`."""
    (tmp_path / "run.yaml").write_text(TRAIN)
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def stand_in(folder: Path, name: str, ends: str) -> Path:
    """A program that keeps what it is given; returns the file."""
    path, given = folder / "bin" / name, folder / f"given to {name}"
    path.write_text(f'#!/bin/bash\n{{ echo "$@"; /bin/cat; }} > "{given}"\n{ends}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return given


def test_a_dry_run_prints_the_job_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*"))
    assert main(["launch", "slurm", "run.yaml", "--nodes", "2", "--shared", ".", "--dry_run", "--lr", "1e-6"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n# Made by: treewise launch slurm --nodes=2 --shared=. run.yaml --lr 1e-6\n")
    assert "\nwords=(--lr 1e-6)\n" in text
    assert sorted(folder.rglob("*")) == before


def test_the_words_of_the_run_may_come_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "local", "--nodes", "2", "run.yaml", "--seed", "3", "--dry_run"]) == 0
    assert "\nwords=(--seed 3)\n" in capsys.readouterr().out


def test_slurm_gets_the_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = stand_in(folder, "sbatch", "echo Submitted batch job 7")
    assert main(["launch", "slurm", "run.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "Submitted batch job 7\n" in printed
    assert f"logs of each role and node: {folder}/runs/first/logs\n" in printed
    assert given.read_text().startswith("\n#!/bin/bash\n")
    assert (folder / "runs/first/logs").is_dir()  # without it Slurm drops a job silently


def test_kubernetes_gets_the_manifests(folder: Path) -> None:
    given = stand_in(folder, "kubectl", "echo job.batch/treewise-first created")
    assert main(["launch", "k8s", "run.yaml", "--image", "me/treewise"]) == 0
    assert given.read_text().startswith("apply -f -\n# Made by")
    assert not (folder / "runs").exists()  # the folder is one of the pods


def test_a_scheduler_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"sbatch is not on this machine.*--dry_run"):
        main(["launch", "slurm", "run.yaml", "--debug"])


def test_a_scheduler_that_refuses_is_quoted(folder: Path) -> None:
    stand_in(folder, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"sbatch refused the job \(1\): sbatch: error: invalid partition"):
        main(["launch", "slurm", "run.yaml", "--debug"])


def test_on_this_machine_the_job_takes_the_place_of_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[str]] = []

    def take(program: str, words: list[str]) -> None:
        taken.append([program, *words])
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvp", take)
    (folder / "run.yaml").write_text(ONLINE)
    with pytest.raises(ConfigError, match="needs bash and setsid"):
        main(["launch", "local", "run.yaml", "--nodes", "2", "--server_nodes", "1", "--debug"])
    for name in ("bash", "setsid"):
        stand_in(folder, name, "")
    with pytest.raises(SystemExit):
        main(["launch", "local", "run.yaml", "--nodes", "2", "--server_nodes", "1"])
    assert taken[0][:3] == ["bash", "bash", "-c"]


def test_a_full_disk_and_a_folder_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        def mkdir(path: Path, **_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, "mkdir", mkdir)

    stand_in(folder, "sbatch", "")
    fail(errno.ENOSPC)
    with pytest.raises(DiskError, match=r"runs/first/logs cannot be written \(No space left on device\)"):
        main(["launch", "slurm", "run.yaml", "--debug"])
    fail(errno.EACCES)
    with pytest.raises(ConfigError, match=r"runs/first/logs: .* \(Permission denied\)"):
        main(["launch", "slurm", "run.yaml", "--debug"])
    assert not (folder / "given to sbatch").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("slurm",), "give the configuration of a run"),
        (("slurm", "absent.yaml"), r"absent\.yaml: the configuration cannot be read"),
        (("slurm", "run.yaml", "--nods", "2"), r"unknown key 'nods'"),
        (("slurm", "run.yaml", "--resume"), "it is a flag"),
        (("pbs", "run.yaml"), "invalid choice: 'pbs'"),
    ],
)
def test_wrong_words_are_errors(folder: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["launch", *words, "--debug"])
