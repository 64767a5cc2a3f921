"""Configurations of runs, and jobs of them."""

from pathlib import Path

from treewise.cli.launch.job import ClusterJob, job_of
from treewise.cli.launch.render import rendered
from treewise.cli.launch.settings import LaunchSettings, Scheduler

TRAIN = "model: my-model\ndata: rows.jsonl\noutput_dir: runs/first\nreport_to: none\n"
ONLINE = "model: my-model\ntasks: sum\nsampler: vllm\noutput_dir: runs/first\nreport_to: none\n"


def job(
    folder: Path, text: str, *flags: str, scheduler: Scheduler = "slurm", **changes: object
) -> tuple[ClusterJob, LaunchSettings]:
    """Of a configuration in `folder`, with the settings that it was made with."""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    given: dict[str, object] = {"shared": "/runs" if scheduler == "k8s" else str(folder), "image": "me/treewise"}
    settings = LaunchSettings(**{**given, **changes})  # type: ignore[arg-type]
    return job_of(scheduler, "run.yaml" if folder == Path.cwd() else str(path), flags, settings, folder), settings


def text_of(folder: Path, text: str, *flags: str, scheduler: Scheduler = "slurm", **changes: object) -> str:
    """The job as it is submitted."""
    made, settings = job(folder, text, *flags, scheduler=scheduler, **changes)
    return rendered(scheduler, made, settings, "treewise launch")
