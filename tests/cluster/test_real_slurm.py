"""Jobs of a real Slurm, where it is installed: it queues again and replaces nodes itself, and the run ends with the
weights of one that nothing happened to.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import jobs, machines, real_slurm
from tests.cluster.real_slurm import RealSlurm
from treewise.trainer.checkpoint import store

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(real_slurm.missing()), reason=real_slurm.missing()),
    pytest.mark.xdist_group("cluster"),
]


class Submitted(jobs.Job):
    """The job 1 of a real Slurm."""

    slurm: RealSlurm  # type: ignore[assignment]

    @classmethod
    @contextmanager
    def sft(cls, folder: Path) -> Iterator["Submitted"]:
        """On two of three machines."""
        machines.require()
        with jobs.sft(folder, 3) as job, RealSlurm(job.machines, folder / "real") as slurm:
            found = cls.__new__(cls)
            found.__dict__ = {**job.__dict__, "slurm": slurm}
            slurm.environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            words = ["launch", "slurm", "run.yaml", "--gpus_per_node", "0", "--nodes", "2", "--shared", str(folder)]
            printed = slurm.run(sys.executable, "-m", "treewise", *words, cwd=folder)
            assert "Submitted batch job 1\n" in printed, printed
            yield found

    def until_step(self, step: int) -> None:
        self.slurm.until(lambda: self.last_step >= step or self.has_ended)
        assert not self.has_ended, self.logs()

    @property
    def has_ended(self) -> bool:
        """Whether Slurm does nothing more with it."""
        return self.slurm.job("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

    def finish(self):
        self.slurm.until(lambda: self.has_ended, 500)
        assert self.slurm.job("JobState") == "COMPLETED", self.logs()
        return self.weights()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    with Submitted.sft(tmp_path_factory.mktemp("whole") / "run") as job:
        job.finish()
    return job


def test_a_job_whose_time_ends_is_saved_and_queued_again(whole: Submitted, tmp_path: Path) -> None:
    with Submitted.sft(tmp_path / "run") as job:
        job.until_step(2)
        job.slurm.run("scancel", "--batch", "--signal=USR1", "1")  # as Slurm does by itself before the limit
        job.slurm.until(lambda: job.slurm.job("Restarts") == "1")
        assert "finishing the step and saving" in job.logs()
        assert "again: ending at once" not in job.logs()
        assert store.newest(job.output)[0] is not None
        jobs.assert_the_same(job.finish(), whole.weights())


def test_a_job_that_loses_a_node_begins_again_on_another(whole: Submitted, tmp_path: Path) -> None:
    with Submitted.sft(tmp_path / "run") as job:
        job.until_step(2)
        job.slurm.lose("n1")
        job.slurm.until(lambda: job.slurm.job("Restarts") == "1")
        jobs.assert_the_same(job.finish(), whole.weights())
        assert job.slurm.job("NodeList") == "n[0,2]"


def test_a_signal_to_all_processes_of_a_job_saves_it(whole: Submitted, tmp_path: Path) -> None:
    """As before a preemption: workers get it from Slurm and from torchrun."""
    with Submitted.sft(tmp_path / "run") as job:
        job.until_step(2)
        job.slurm.run("scancel", "--signal=TERM", "1")
        job.slurm.until(lambda: job.has_ended)
        assert "finishing the step and saving" in job.logs()
        assert "again: ending at once" not in job.logs()
        assert 2 <= job.last_step < jobs.STEPS


def test_a_job_that_is_cancelled_ends(whole: Submitted, tmp_path: Path) -> None:
    with Submitted.sft(tmp_path / "run") as job:
        job.until_step(2)
        job.slurm.run("scancel", "1")
        job.slurm.until(lambda: job.slurm.job("JobState") == "CANCELLED")
        assert job.last_step >= 2
