"""A real Slurm on machines that are namespaces: `slurmctld` on the first one, `slurmd` on each, where installed."""

import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.cluster.machines import Machines

CONFIGURATION = """\
ClusterName=treewise
SlurmctldHost=n0(10.60.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=10
KillWait=5
JobRequeue=1
"""
NODE = "NodeName={name} NodeAddr=10.60.0.{number} NodeHostname={name} CPUs={cpus} State=UNKNOWN\n"
PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"


def missing() -> str:
    """What there would have to be."""
    absent = [each for each in ("slurmctld", "slurmd", "sbatch", "srun") if shutil.which(each) is None]
    return f"needs {', '.join(absent)}" if absent else ""


class RealSlurm:
    """Slurm while entered; the last machine is a spare of jobs that take fewer."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines, self.folder = machines, folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "RealSlurm":
        for name in ("state", *(f"spool-{each}" for each in self.machines.names)):
            (self.folder / name).mkdir(parents=True)
        cpus = len(os.sched_getaffinity(0))
        nodes = [NODE.format(name=each, number=n, cpus=cpus) for n, each in enumerate(self.machines.names, 1)]
        text = CONFIGURATION.format(folder=self.folder) + "".join(nodes) + PARTITION
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self._start("controller", "n0", "slurmctld", "-D", "-c")
        for name in self.machines.names:
            self._start(name, name, "slurmd", "-D", "-N", name)
        self.until(lambda: self.states() == ["idle"] * len(self.machines.names))
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--full", "--signal=KILL", "--user=root")
        for each in self._daemons.values():
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait(30)

    def _start(self, key: str, machine: str, *command: str) -> None:
        with (self.folder / f"{key}.log").open("wb") as log:
            self._daemons[key] = subprocess.Popen(
                self.machines.words(machine, command),
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """What a command prints on the first machine."""
        command = self.machines.words("n0", words)
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=120
        )
        return done.stdout + done.stderr

    def states(self) -> list[str]:
        """Of the nodes, as `idle`."""
        return self.run("sinfo", "--Node", "--noheader", "--format", "%T").split()

    def job(self, name: str) -> str:
        """A field of the job, as `JobState`."""
        fields = dict(each.split("=", 1) for each in self.run("scontrol", "show", "job", "1").split() if "=" in each)
        return fields.get(name, "")

    def until(self, holds: object, seconds: float = 300) -> None:
        """Waits."""
        end = time.monotonic() + seconds
        while not holds():  # type: ignore[operator]
            assert time.monotonic() < end, self.run("scontrol", "show", "job") + self.run("sinfo", "-N")
            threading.Event().wait(0.1)

    def lose(self, name: str) -> None:
        """A machine with its `slurmd`."""
        self.machines.lose(name)
