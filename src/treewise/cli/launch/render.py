"""A job as text: a script of Slurm or of this machine, or manifests of Kubernetes."""

import json
import shlex
from collections.abc import Sequence

import jinja2

from treewise.cli.launch.job import ClusterJob
from treewise.cli.launch.settings import LaunchSettings, Scheduler

ROLES = ("trainer", "server")
FILES: dict[Scheduler, str] = {"slurm": "slurm.sh.j2", "k8s": "k8s.yaml.j2", "local": "local.sh.j2"}


def rendered(scheduler: Scheduler, job: ClusterJob, settings: LaunchSettings, made_by: str) -> str:
    """The whole text. made_by: the command that asked for it, for its first lines."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("treewise.cli.launch", "templates"),
        autoescape=False,  # a shell's words are quoted by `q`, YAML's by `json`
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"q": shlex.quote, "words": shlex.join, "server_words": _server_words, "json": json.dumps}
    given = {"job": job, "settings": settings, "made_by": " ".join(made_by.split())}
    roles = {name: environment.get_template(f"{name}.sh.j2").render(given).rstrip("\n") for name in ROLES}
    names = [f"{job.name}-{number}.{job.name}" for number in range(settings.trainer_nodes, settings.nodes)]
    more = {"options": slurm_options(job, settings), "servers": " ".join(names)}
    text: str = environment.get_template(FILES[scheduler]).render(given | roles | more)
    return text.rstrip("\n") + "\n"


def slurm_options(job: ClusterJob, settings: LaunchSettings) -> list[str]:
    """What sbatch reads in the script's `#SBATCH` lines."""
    options = {
        "job-name": job.name,
        "nodes": settings.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": settings.gpus_per_node or None,
        "time": settings.time,
        "signal": f"B:USR1@{settings.grace}",
        "open-mode": "append",
        "chdir": job.folder,
        "output": f"{job.logs.replace('%', '%%')}/job-%j.log",
    }
    lines = [f"--{name}={_for_sbatch(str(value))}" for name, value in options.items() if value is not None]
    more = " ".join(map(_for_sbatch, shlex.split(settings.submit_args)))
    return [*lines, "--exclusive", "--requeue", *([more] if more else [])]


def _for_sbatch(word: str) -> str:
    """In double quotes where it has to be, as sbatch reads its lines."""
    if word and all(letter.isalnum() or letter in "-_=+:,.@%/*[]" for letter in word):
        return word
    inner = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'


def _server_words(words: Sequence[str]) -> str:
    """Quoted, with the port of each server in place of `{port}`."""
    parts = [[shlex.quote(part) if part else "" for part in word.split("{port}")] for word in words]
    return " ".join('"$port"'.join(each) for each in parts)
