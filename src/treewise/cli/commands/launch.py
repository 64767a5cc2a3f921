"""`treewise launch slurm|k8s|local RUN.yaml --nodes 4 --server_nodes 2`: one job of a scheduler that runs it."""

import argparse
import os
import shlex
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

from treewise.base.own_files import disk_error, is_no_room
from treewise.cli.declared_flags import add_flags
from treewise.cli.launch.settings import SCHEDULERS, LaunchSettings, Scheduler
from treewise.cli.training_run import split_words
from treewise.errors import ConfigError

SUBMIT = {"slurm": ("sbatch",), "k8s": ("kubectl", "apply", "-f", "-")}  # the job on their standard input


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `LaunchSettings`; all other flags are keys of the run."""
    parser.usage = "treewise launch slurm|k8s|local RUN.yaml [--nodes N] [--server_nodes N] [--dry_run] [--key value]"
    parser.add_argument("scheduler", choices=SCHEDULERS, help="that the job is given to; local: this machine")
    add_flags(parser, LaunchSettings)
    parser.add_argument("--dry_run", action="store_true", help="print the job, and submit nothing")
    parser.epilog = "What the job does: docs/launch.md. Keys of the run: treewise train --help, treewise rl --help."


def run(args: argparse.Namespace) -> int:
    """Submits the job, or prints it; returns the exit code."""
    from treewise.cli.launch.job import job_of  # slow to import
    from treewise.cli.launch.render import rendered

    settings = LaunchSettings(**{field.name: getattr(args, field.name) for field in fields(LaunchSettings)})
    path, overrides = split_words(args)
    job = job_of(args.scheduler, path, overrides, settings, Path.cwd())
    text = rendered(args.scheduler, job, settings, shlex.join(["treewise", "launch", *_words(args, settings, path)]))
    if args.dry_run:
        print(text, end="")
        return 0
    if args.scheduler != "k8s":
        _make_logs(Path(job.logs))
    if args.scheduler == "local":
        if absent := [each for each in ("bash", "setsid") if shutil.which(each) is None]:
            raise ConfigError(f"launch local needs {' and '.join(absent)}, as Linux has them; start torchrun yourself.")
        os.execvp("bash", ["bash", "-c", text])  # signals reach it, and its exit code is this command's
    _submit(args.scheduler, text)
    print(f"logs of each role and node: {job.logs}")
    return 0


def _words(args: argparse.Namespace, settings: LaunchSettings, path: str | None) -> list[str]:
    given = [
        f"--{field.name}={getattr(settings, field.name)}"
        for field in fields(settings)
        if getattr(settings, field.name) != field.default
    ]
    return [args.scheduler, *given, str(path), *[word for word in args.overrides if word != path]]


def _make_logs(folder: Path) -> None:
    """Before the job: Slurm drops a job silently whose folder of logs is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if is_no_room(error):
            raise disk_error(folder, error, 1) from error
        raise ConfigError(f"{folder}: the logs of the job cannot be written there ({error.strerror}).") from None


def _submit(scheduler: Scheduler, text: str) -> None:
    """Raises `ConfigError` where the scheduler is not there, or refuses the job."""
    command = SUBMIT[scheduler]
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not on this machine: launch on one that has it (a login node), or give --dry_run and "
            "take what it prints there."
        )
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(f"{command[0]} refused the job ({done.returncode}): {reason}")
    print(done.stdout.strip())
