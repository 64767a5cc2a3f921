"""A job on machines of ours, from `treewise launch` to its weights."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from tests.cli.helpers import save_tiny_model, write_rows
from tests.cluster.machines import Machines
from tests.cluster.slurm import StandIn
from treewise.trainer.checkpoint import store

ROWS = [
    {"token_ids": [1, 2, 3, 4 + tree, *range(20 + end, 25)], "group": f"g{tree}"}
    for tree in range(8)
    for end in range(3)
]
STEPS = 12
SFT = {
    "model": "model",
    "data": "rows.jsonl",
    "sharded": True,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-3,  # at 1e-8 AdamW makes a step of every rounding
    "per_device_train_batch_size": 1,
    "max_steps": STEPS,
    "save_steps": 1,
    "save_total_limit": STEPS,
    "use_cpu": True,
    "report_to": "none",
}


class Job:
    """A folder that all machines see, with a configuration; and the job of it, submitted to the stand-in."""

    def __init__(self, folder: Path, machines: Machines, settings: dict[str, object]) -> None:
        self.folder, self.output = folder, folder / "runs" / "a run"
        folder.mkdir(exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump({**settings, "output_dir": str(self.output)}))
        self.slurm = StandIn(machines, folder / "slurm")
        self.machines = machines

    def launch(self, *flags: str) -> str:
        """`treewise launch slurm`, on this machine; what it prints."""
        words = [sys.executable, "-m", "treewise", "launch", "slurm", "run.yaml", "--gpus_per_node", "0", *flags]
        environment = {**self.slurm.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.slurm.environment = environment
        command = [*words, "--shared", str(self.folder)]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def until_step(self, step: int) -> None:
        """Waits for a checkpoint."""
        self.until(lambda: any(store.step_of(each) >= step for each in store.checkpoints(self.output)))

    def until(self, holds: Callable[[], bool], seconds: float = 900) -> None:
        """Waits; a job that has ended meanwhile is an error."""
        end = time.monotonic() + seconds
        while not holds():
            assert self.slurm.process is not None
            assert self.slurm.process.poll() is None, self.logs()
            assert time.monotonic() < end, self.logs()
            threading.Event().wait(0.02)

    def kill_a_worker(self, name: str) -> None:
        """A process that torchrun started on a machine."""
        words = {number: Path(f"/proc/{number}/cmdline").read_bytes() for number in self.machines.processes(name)}
        is_of_run = {number: b"\0treewise\0" in each for number, each in words.items()}
        (worker,) = [each for each in words if is_of_run[each] and b"treewise.cli.launch.torchrun" not in words[each]]
        os.kill(worker, signal.SIGKILL)

    def kill_server(self, name: str) -> None:
        """All that its script started on a machine, but for the script."""
        for number in self.machines.processes(name):
            words = Path(f"/proc/{number}/cmdline").read_bytes()
            if b"python" in words.split(b"\0")[0]:
                os.kill(number, signal.SIGKILL)

    def finish(self) -> dict[str, torch.Tensor]:
        """The weights at the end of the job, which succeeds."""
        assert self.slurm.wait() == 0, self.logs()
        return self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the final model."""
        return load_file(self.output / "model.safetensors")

    @property
    def last_step(self) -> int:
        """Of the newest checkpoint."""
        return max((store.step_of(each) for each in store.checkpoints(self.output)), default=0)

    def logs(self) -> str:
        """The ends of all logs."""
        files = sorted((self.output / "logs").glob("*.log"))
        return "\n".join(f"== {each.name}\n{each.read_text(errors='replace')[-3000:]}" for each in files)


@contextmanager
def sft(folder: Path, num_machines: int = 2) -> Iterator[Job]:
    """Fine-tuning on token rows, sharded over two machines."""
    folder.mkdir(exist_ok=True)
    save_tiny_model(folder / "model")
    write_rows(folder / "rows.jsonl", ROWS)
    with Machines(num_machines) as machines:
        yield Job(folder, machines, SFT)


def assert_the_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=atol, rtol=0)
