"""Fine-tuning that is sharded over two machines: killed and queued again, it ends with the weights of a quiet one."""

from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.cluster import jobs, machines
from treewise.cli.main import main

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> jobs.Job:
    """A job that nothing happens to."""
    machines.require()
    with jobs.sft(tmp_path_factory.mktemp("whole")) as job:
        assert "Submitted batch job" in job.launch("--nodes", "2")
        job.slurm.start()
        job.finish()
    return job


def test_two_machines_end_with_the_weights_of_one_process(
    whole: jobs.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole.folder)
    settings = {**jobs.SFT, "sharded": False, "per_device_train_batch_size": 2, "output_dir": str(tmp_path / "one")}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", str(tmp_path / "one.yaml")]) == 0
    jobs.assert_the_same(whole.weights(), load_file(tmp_path / "one" / "model.safetensors"), atol=2e-6)


def test_a_job_whose_time_ends_saves_and_goes_on(whole: jobs.Job, tmp_path: Path) -> None:
    with jobs.sft(tmp_path / "run") as job:
        job.launch("--nodes", "2")
        job.slurm.start()
        job.until_step(2)
        job.slurm.end_its_time()
        code = job.slurm.wait()
        assert job.slurm.is_queued_again, job.logs()
        assert code not in (0, 2)
        assert 2 <= job.last_step < jobs.STEPS, job.logs()
        job.slurm.start()
        jobs.assert_the_same(job.finish(), whole.weights())
        assert "trainer-n0.log" in {each.name for each in (job.output / "logs").iterdir()}


def test_an_error_that_is_explained_ends_the_job_at_once(tmp_path: Path) -> None:
    """By its code and its message, which the processes of the first attempt alone print."""
    with jobs.sft(tmp_path / "run") as job:
        with (job.folder / "rows.jsonl").open("a") as rows:
            rows.write('{"token_ids": "none"}\n')
        job.launch("--nodes", "2")
        job.slurm.start()
        assert job.slurm.wait() == 2, job.logs()
        assert not job.slurm.is_queued_again
        assert 1 <= job.logs().count("rows.jsonl:25") <= 2, job.logs()


def test_a_job_that_loses_a_node_goes_on(whole: jobs.Job, tmp_path: Path) -> None:
    with jobs.sft(tmp_path / "run") as job:
        job.launch("--nodes", "2")
        job.slurm.start()
        job.until_step(3)
        job.machines.lose("n1")
        job.slurm.end()  # what Slurm does with a job of a node that does not answer
        assert 3 <= job.last_step < jobs.STEPS, job.logs()
        job.machines.bring_back("n1")
        job.slurm.start()
        jobs.assert_the_same(job.finish(), whole.weights())


def test_a_process_that_is_killed_begins_again_within_the_job(whole: jobs.Job, tmp_path: Path) -> None:
    """The other machine's, too, by torchrun: Slurm does not notice."""
    with jobs.sft(tmp_path / "run") as job:
        job.launch("--nodes", "2")
        job.slurm.start()
        job.until_step(3)
        job.kill_a_worker("n1")
        jobs.assert_the_same(job.finish(), whole.weights())
        assert job.logs().count("starting from step 0") == 1
