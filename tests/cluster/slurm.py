"""Slurm's commands on machines that are namespaces, as far as a job of ours uses them: `sbatch`, `srun`, `scontrol`.

`StandIn` is the controller: a test starts a job that was submitted, loses nodes, ends its time, and queues it again.
What srun does with signals is what Slurm's does (`_srun_signal_mgr` in src/srun): SIGTERM kills all processes, SIGUSR1
reaches each of them.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the commands start fast
    from tests.cluster.machines import Machines

ROOT = Path(__file__).parents[2]
VARIABLE = "TREEWISE_CLUSTER"  # the folder of the controller


class StandIn:
    """A controller of machines. Its commands are in the folder `bin`, for a PATH."""

    def __init__(self, machines: "Machines", folder: Path) -> None:
        self.machines, self.folder, self.bin = machines, folder, folder / "bin"
        self.bin.mkdir(parents=True)
        (folder / "tasks").mkdir()
        for name in ("sbatch", "srun", "scontrol"):
            path = self.bin / name
            program = f'exec {shlex.quote(sys.executable)} -m tests.cluster.slurm {name} "$@"'
            path.write_text(f"#!/bin/bash\nexport PYTHONPATH={shlex.quote(str(ROOT))}\n{program}\n")
            path.chmod(0o755)
        words = {name: machines.words(name, []) for name in machines.names}
        (folder / "machines.json").write_text(json.dumps(words))
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, VARIABLE: str(folder), "PYTHONPATH": str(ROOT)}
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def is_queued_again(self) -> bool:
        """Whether the job asked for it."""
        return (self.folder / f"requeued-{self.num_starts}").exists()

    def start(self) -> None:
        """The job that was submitted, on its first machines. An earlier start has ended."""
        given = json.loads((self.folder / "job.json").read_text())
        self.num_starts += 1
        names = self.machines.names[: given["nodes"]]
        own = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": ",".join(names), "SLURMD_NODENAME": names[0]}
        own |= {"SLURM_RESTART_COUNT": str(self.num_starts - 1)}
        with Path(given["output"].replace("%j", "41").replace("%%", "%")).open("ab") as log:
            self.process = subprocess.Popen(
                self.machines.words(names[0], ["bash", str(self.folder / "job.sh")]),
                cwd=given["chdir"],
                env={**self.environment, **own},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, seconds: float = 900) -> int:
        """Until the job ends, by itself; then all of its processes do. Its exit code."""
        assert self.process is not None
        code = self.process.wait(seconds)
        self.end()
        return code

    def end(self) -> None:
        """All processes of the job on all machines, as Slurm does where a node has failed."""
        for name in self.machines.names:
            self.machines.kill(name)
        groups = [int(each.name) for each in (self.folder / "tasks").iterdir()]
        for group in [*groups, *([] if self.process is None else [self.process.pid])]:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)

    def end_its_time(self) -> None:
        """The signal that the job asked for before its limit: of its batch script alone."""
        given = json.loads((self.folder / "job.json").read_text())
        assert re.fullmatch(r"B:USR1@\d+", given["signal"])
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGUSR1)


# -- commands ---------------------------------------------------------------------------------------------------------


def sbatch(words: list[str]) -> int:
    """Keeps the job on the standard input."""
    folder, script = Path(os.environ[VARIABLE]), sys.stdin.read()
    assert words == []
    given: dict[str, object] = {}
    for line in re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE):
        for word in shlex.split(line):
            name, _, value = word.removeprefix("--").partition("=")
            given[name] = value
    given["nodes"] = int(str(given["nodes"]))
    if not Path(str(given["output"])).parent.is_dir():
        return 0  # Slurm drops such a job silently
    (folder / "job.json").write_text(json.dumps(given))
    (folder / "job.sh").write_text(script)
    print("Submitted batch job 41")
    return 0


def scontrol(words: list[str]) -> int:
    """`show hostnames LIST`, `requeue JOB`."""
    if words[:2] == ["show", "hostnames"]:
        print(words[2].replace(",", "\n"))
        return 0
    assert words == ["requeue", "41"]
    number = int(os.environ["SLURM_RESTART_COUNT"]) + 1
    (Path(os.environ[VARIABLE]) / f"requeued-{number}").touch()
    return 0


def srun(words: list[str]) -> int:
    """A process on each node of the list; where one fails, all end."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("job-name", "nodes", "ntasks", "ntasks-per-node", "nodelist", "cpu-bind", "open-mode", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--kill-on-bad-exit", required=True)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)
    names = args.nodelist.split(",")
    assert (int(args.nodes), int(args.ntasks), args.ntasks_per_node) == (len(names), len(names), "1")
    machines = json.loads((Path(os.environ[VARIABLE]) / "machines.json").read_text())
    tasks = []

    def noted() -> None:
        (Path(os.environ[VARIABLE]) / "tasks" / str(os.getpid())).touch()

    for number, name in enumerate(names):
        with Path(args.output.replace("%N", name).replace("%%", "%")).open("ab") as log:
            tasks.append(
                subprocess.Popen(
                    [*machines[name], *args.command],
                    env={**os.environ, "SLURMD_NODENAME": name, "SLURM_PROCID": str(number)},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=noted,  # before it does anything: this program may be killed at any moment
                )
            )

    def to_all(number: int) -> None:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, number)

    signal.signal(signal.SIGTERM, lambda *_: to_all(signal.SIGKILL))
    signal.signal(signal.SIGUSR1, lambda *_: to_all(signal.SIGUSR1))

    def wait(task: subprocess.Popen[bytes]) -> None:
        if task.wait() != 0 and args.kill_on_bad_exit == "1":
            to_all(signal.SIGTERM)

    waiting = [threading.Thread(target=wait, args=(task,)) for task in tasks]
    for each in waiting:
        each.start()
    for each in waiting:
        each.join()
    codes = [task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks]
    return max(codes)


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
