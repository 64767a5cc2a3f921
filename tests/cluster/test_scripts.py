"""What a job does with its steps, on this machine alone: the run and the servers are programs of a few lines."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.cluster.slurm import StandIn
from treewise.cli.main import main

pytestmark = [
    pytest.mark.skipif(shutil.which("bash") is None or shutil.which("setsid") is None, reason="needs bash, util-linux"),
    pytest.mark.xdist_group("cluster/test_scripts"),
]

ONLINE = {"model": "model", "tasks": "sum", "sampler": "vllm", "report_to": "none"}
# In place of Python with torchrun: says what it was given, then waits for SIGTERM, after which it "saves".
RUN = """#!/bin/bash
printf '%s\\n' "$@" > "words-$SLURMD_NODENAME"
echo "$NO_PROXY" > no_proxy
trap 'num_signals=$((num_signals + 1))' TERM
trap 'echo killed by USR1 >> wrong' USR1
num_signals=0 code=1
touch "runs-$SLURMD_NODENAME"
until [ -e "end" ] || ((num_signals)); do /bin/sleep 0.02; done
if [ -e "end" ]; then read -r code < "end"; exit "$code"; fi
echo "saved" >> "saved-$SLURMD_NODENAME"
if [ -e "code" ]; then read -r code < "code"; fi
exit "$code"
"""
SERVER = """#!/bin/bash
echo "$2" >> "served-$SLURMD_NODENAME"
until [ -e "down" ]; do /bin/sleep 0.02; done
exit 9
"""


class Here:
    """Machines that are this one."""

    def __init__(self, count: int) -> None:
        self.names = [f"n{number}" for number in range(count)]

    def words(self, _name: str, command: list[str]) -> list[str]:
        return command

    def kill(self, _name: str) -> None:
        pass


class Scripted:
    """A job on `Here`."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        for name, text in (("run", RUN), ("serve", SERVER)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.slurm = StandIn(Here(nodes), folder / "slurm")  # type: ignore[arg-type]
        (self.slurm.bin / "sleep").write_text("#!/bin/bash\n")  # between two starts of a server
        (self.slurm.bin / "sleep").chmod(0o755)

    def there(self, *names: str) -> None:
        """Waits for files."""
        self.until(lambda: all((self.folder / name).exists() for name in names))

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end, self.log()
            threading.Event().wait(0.01)

    def log(self) -> str:
        return "\n".join(each.read_text() for each in sorted((self.folder / "runs of mine/it's/logs").iterdir()))

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().split("\n")[:-1]


def at_work_in(folder: Path) -> list[str]:
    """The programs whose folder this is."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.cwd() == str(folder) and each.pid != os.getpid():
                found.append(each.name())
    return found


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Submits a job to the stand-in and starts it; all ends with the test."""
    made: list[Scripted] = []

    def launch(*flags: str, **settings: object) -> Scripted:
        job = Scripted(tmp_path, 4)
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"output_dir": "runs of mine/it's", **settings}))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", f"{job.slurm.bin}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("TREEWISE_CACHE", str(tmp_path / "cache"))
        for name in ("TREEWISE_CLUSTER", "PYTHONPATH"):
            monkeypatch.setenv(name, job.slurm.environment[name])
        own = ("--gpus_per_node", "0", "--shared", ".", "--python", str(tmp_path / "run"), *flags)
        assert main(["launch", "slurm", "run.yaml", *own, "--debug"]) == 0
        made.append(job)
        job.slurm.start()
        return job

    yield launch
    for each in made:
        each.slurm.end()


def online(launch: Callable[..., Scripted], *flags: str) -> Scripted:
    return launch("--nodes", "4", "--server_nodes", "2", "--server_command", "./serve {model} {port}", *flags, **ONLINE)


def test_nodes_get_their_roles_and_the_run_its_servers(launched: Callable[..., Scripted]) -> None:
    job = online(launched, "--port", "21000")
    job.there("runs-n0", "runs-n1", "served-n2", "served-n3")
    assert job.lines("served-n2") == job.lines("served-n3") == ["21001"]
    words = job.lines("words-n1")
    assert words[words.index("--rdzv_endpoint") + 1] == "n0:21000"
    assert words[words.index("--rdzv_conf") + 1] == "is_host=false"
    place = words.index("--sampler_settings.base_url")
    assert words[place + 1 : place + 4] == ["http://n2:21001/v1", "http://n3:21001/v1", "--resume"]
    assert job.lines("no_proxy")[0].endswith("n2,n3")
    (job.folder / "end").write_text("0\n")
    assert job.slurm.wait(60) == 0
    assert not job.slurm.is_queued_again


def test_before_the_time_is_over_the_run_alone_is_signalled_once_and_the_job_queued_again(
    launched: Callable[..., Scripted],
) -> None:
    job = online(launched)
    job.there("runs-n0", "runs-n1", "served-n2")
    job.slurm.end_its_time()
    assert job.slurm.wait(60) == 1
    assert job.lines("saved-n0") == job.lines("saved-n1") == ["saved"]
    assert job.slurm.is_queued_again
    assert not (job.folder / "wrong").exists()


def test_a_run_that_ends_while_it_is_signalled_is_not_queued_again(launched: Callable[..., Scripted]) -> None:
    job = launched("--nodes", "2", model="model", data="rows.jsonl")
    job.there("runs-n0", "runs-n1")
    (job.folder / "code").write_text("0\n")
    job.slurm.end_its_time()
    assert job.slurm.wait(60) == 0
    assert not job.slurm.is_queued_again


def test_a_job_that_is_cancelled_saves(launched: Callable[..., Scripted]) -> None:
    job = launched("--nodes", "2", model="model", data="rows.jsonl")
    job.there("runs-n0", "runs-n1")
    assert job.slurm.process is not None
    job.slurm.process.send_signal(signal.SIGTERM)
    assert job.slurm.wait(60) == 1
    assert job.lines("saved-n1") == ["saved"]
    assert not job.slurm.is_queued_again


def test_a_run_that_fails_ends_the_job_with_its_code(launched: Callable[..., Scripted]) -> None:
    job = online(launched)
    job.there("runs-n0", "runs-n1", "served-n2")
    (job.folder / "end").write_text("7\n")
    assert job.slurm.wait(60) == 7
    assert not job.slurm.is_queued_again


def test_a_server_that_ends_is_started_anew_and_ends_the_job_after_five_times(
    launched: Callable[..., Scripted],
) -> None:
    job = online(launched)
    job.there("runs-n0", "served-n2", "served-n3")
    (job.folder / "down").touch()
    assert job.slurm.wait(60) == 1
    assert max(len(job.lines(name)) for name in ("served-n2", "served-n3")) == 5
    assert "ended with code 9" in job.log()
    assert "the servers ended: see " in job.log()


def test_a_node_that_does_not_see_the_folder_says_so(launched: Callable[..., Scripted], tmp_path: Path) -> None:
    text = tmp_path / "run.yaml"
    job = launched("--nodes", "2", model="model", data="rows.jsonl")
    job.slurm.end()
    text.unlink()
    job.slurm.start()
    assert job.slurm.wait(60) == 2
    assert re.search(r"n\d does not see .*run\.yaml: each node has to see", job.log())


def test_a_port_that_is_taken_is_named(launched: Callable[..., Scripted]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = launched("--nodes", "2", "--port", str(port), model="model", data="rows.jsonl")
        job.until(lambda: f"port {port} of n0 is taken: give another by --port" in job.log())
        (job.folder / "end").write_text("1\n")  # of torchrun on n1, which finds no other
        assert job.slurm.wait(60) == 2


def test_a_second_job_takes_other_ports(launched: Callable[..., Scripted]) -> None:
    job = online(launched)
    job.there("served-n2")
    assert job.lines("served-n2") == [str(10000 + 41 + 1)]  # by the number of the job


def test_on_this_machine_a_signal_saves_and_the_servers_end(tmp_path: Path) -> None:
    job = Scripted(tmp_path, 1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"output_dir": "runs of mine/it's", **ONLINE}))
    words = ["--nodes", "2", "--server_nodes", "1", "--gpus_per_node", "0", "--python", str(tmp_path / "run")]
    command = [sys.executable, "-m", "treewise", "launch", "local", "run.yaml", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    serve = ["--server_command", "./serve {model} {port}"]
    with subprocess.Popen([*command, *serve], cwd=tmp_path, env=environment, start_new_session=True) as process:
        job.there("runs-", "served-")
        assert "serve" in " ".join(at_work_in(tmp_path))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 1
    assert job.lines("saved-") == ["saved"]
    job.until(lambda: not at_work_in(tmp_path))
