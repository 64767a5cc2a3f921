"""The folder of a run: what it may hold before a run begins, what to resume from, and the settings written into it."""

import argparse
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewise.base.durable import write_atomically
from treewise.base.own_files import read_own
from treewise.cli.config import RunConfig, differences, resolved_text, resolved_values
from treewise.cli.output import is_first_rank
from treewise.errors import CheckpointError, ConfigError, num

if TYPE_CHECKING:
    from treewise.trainer import TreeTrainingArguments

_RESOLVED = "resolved_config.yaml"
FINISHED = "trainer_state.json"  # written into the run's folder when it ends
LOG = "log.jsonl"
_KEEP_MEMORY = "TREEWISE_KEEP_FREED_MEMORY"  # 0: freed memory is returned to the system


_LONGER = {False: "more --max_steps or --num_train_epochs", True: "more --iterations"}  # by whether a run is online
_OF_ONLINE_RUNS = ("journal", "rollouts", "evaluations")  # folders


def check_folder(folder: Path, resume: str | None, overwrite: bool, *, is_online: bool) -> None:
    """Raises `ConfigError` where the folder holds a run that would be lost, or one of the other kind."""
    from treewise.trainer.checkpoint import store

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir {folder} is a file; name a folder.")
    store.check_places(folder)
    if overwrite:
        return
    saved = store.checkpoints(folder)
    if (folder / FINISHED).exists() and not (resume and saved):
        raise ConfigError(
            f"output_dir {folder} holds a finished run"
            + (", of which no checkpoint was saved" if resume else "")
            + f"; choose another (with --model {folder} to go on from its weights), "
            + ("" if resume else f"--resume with {_LONGER[is_online]} to train it further, ")
            + "or --overwrite to train again."
        )
    if saved and not resume:
        raise ConfigError(
            f"output_dir {folder} holds a run up to {saved[-1].name}; choose another, --resume to go on, "
            "or --overwrite to start anew."
        )
    has_journal = any((folder / "journal").glob("iteration-*.jsonl"))
    was_online = True if has_journal else _was_online(folder)
    if was_online not in (None, is_online):
        kind = "an online run (rl --tasks)" if was_online else "a run on recorded data"
        raise ConfigError(f"output_dir {folder} holds {kind}; choose another, or --overwrite to start anew.")
    if has_journal and not resume:
        raise ConfigError(
            f"output_dir {folder} holds an online run of which no checkpoint was saved; choose another, --resume to go "
            "on, or --overwrite to start anew."
        )


def _was_online(folder: Path) -> bool | None:
    """Whether the run of a folder sampled its rollouts itself: by its newest sound checkpoint, else by its settings.
    None: the folder holds no run, or one of which neither can be read.
    """
    from treewise.trainer.checkpoint import store

    for checkpoint in reversed(store.checkpoints(folder)):
        with suppress(CheckpointError):
            return "task" in store.facts_of(checkpoint)
    if not (folder / _RESOLVED).exists():
        return None
    with suppress(ConfigError):
        return "tasks" in _settings_of(folder)
    return None


def _settings_of(folder: Path) -> dict[str, Any]:
    """The settings that the folder's run was last begun with. Raises `ConfigError` where they are damaged."""
    advice = "which settings have changed since is not known, and the file is written again"
    return read_own(folder / _RESOLVED, resolved_values, advice)


def recorded_setting(folder: Path, key: str) -> Any:
    """What the folder's run was last begun with as the value of a key; None where that is not known."""
    with suppress(ConfigError):
        return _settings_of(folder).get(key) if (folder / _RESOLVED).exists() else None
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedFolder:
    """The folder of a run that begins or goes on.

    resume_from: a checkpoint, True for the newest complete one, or None. finished_steps: where it holds the end of a
    run and no further steps are asked for, the steps of that run, else None. Such a run is read and checked as any that
    goes on, and nothing is trained or written.
    """

    resume_from: str | bool | None
    finished_steps: int | None = None


@contextmanager
def opened(
    args: argparse.Namespace, config: RunConfig, arguments: "TreeTrainingArguments", num_steps: int | None = None
) -> Iterator[OpenedFolder]:
    """Locks the run's folder and prepares it. The first rank acts. num_steps: that the settings ask for.

    From now on the process of a run on a CPU keeps the memory that it frees (`_KEEP_MEMORY`), and few kernels.

    Raises:
        ConfigError: the folder holds another run, is in use, or cannot be written.
        CheckpointError: no such checkpoint.
    """
    from treewise.distributed import ranks
    from treewise.nn.platform.memory import keep_few_kernels, keep_freed_memory
    from treewise.trainer.run_context import RunLock

    folder = Path(arguments.output_dir)
    if arguments.device.type == "cpu":
        keep_few_kernels()
    if arguments.device.type == "cpu" and os.environ.get(_KEEP_MEMORY) != "0":
        keep_freed_memory()  # once models are loaded, which frees what it does not need again

    def prepare() -> OpenedFolder:
        stack.enter_context(_leaving_nothing(folder))
        stack.enter_context(RunLock(folder))
        check_folder(folder, args.resume, args.overwrite, is_online="tasks" in config.more)  # another may be faster
        resume_from = _resume_point(folder, args.resume)
        finished_steps = None if num_steps is None else _finished_steps(folder, resume_from, num_steps)
        if finished_steps is None:
            _write_resolved(folder, config, arguments, args.overwrite, resume_from is not None)
        return OpenedFolder(resume_from, finished_steps)

    with ExitStack() as stack:
        yield ranks.on_first_rank(prepare)


def _finished_steps(folder: Path, resume_from: str | bool | None, num_steps: int) -> int | None:
    """The steps of a finished run that is resumed at its end without further ones; one with further steps is open."""
    from treewise.trainer.checkpoint import store

    if resume_from is None or not (folder / FINISHED).exists():
        return None
    found = store.newest(folder)[0] if resume_from is True else Path(str(resume_from))
    step = "" if found is None else found.name.rpartition("-")[2]
    if step.isdigit() and int(step) >= num_steps:
        return int(step)
    (folder / FINISHED).unlink()  # the run is open again
    return None


def tell_finished(folder: str | Path, num_steps: int, *, is_online: bool) -> None:
    """Says that nothing is left to train of a finished run."""
    if is_first_rank():
        done = num(num_steps, "iteration" if is_online else "step")
        print(
            f"{folder} holds a finished run of {done}, and the settings ask for no more: nothing was trained or "
            f"changed. To train it further give {_LONGER[is_online]}."
        )


@contextmanager
def _leaving_nothing(folder: Path) -> Iterator[None]:
    """Takes back the settings of a run that failed before it logged a step, and its folder if the run created it.

    A resumed run that was refused (other data, another optimizer) leaves the settings and the end of the one before.
    """

    was_there, before = folder.exists(), _results(folder)
    kept = {name: (folder / name).read_bytes() for name in (_RESOLVED, FINISHED) if (folder / name).is_file()}
    is_fresh = not was_there or (folder.is_dir() and not any(folder.iterdir()))
    try:
        yield
    except BaseException:
        is_bare = folder.is_dir() and {path.name for path in folder.iterdir()} <= {_RESOLVED, LOG}
        if is_fresh and is_bare and not any(_results(folder)):
            for name in (_RESOLVED, LOG):
                (folder / name).unlink(missing_ok=True)
            if not was_there:
                folder.rmdir()
        elif _results(folder) == before:
            for name, content in kept.items():
                write_atomically(folder / name, content)
        raise


def _results(folder: Path) -> tuple[object, ...]:
    """What changes as soon as a run logs or saves something, or overwrites another."""
    from treewise.trainer.checkpoint import store

    log = folder / LOG
    return (log.stat().st_size if log.is_file() else None, *store.checkpoints(folder))


def _resume_point(folder: Path, resume: str | None) -> str | bool | None:
    """What to resume from: a path, True for the newest complete checkpoint, or None."""
    from treewise.trainer.checkpoint import store

    if resume is None:
        return None
    if resume != "newest":
        if resume.endswith((".yaml", ".yml")):
            raise ConfigError(f"--resume {resume}: CONFIG.yaml comes first, then --resume.")
        if not Path(resume).is_dir():
            raise CheckpointError(f"{resume}: no such checkpoint.")
        return resume
    for line in store.recover(folder):
        print(line, file=sys.stderr)
    if store.checkpoints(folder):
        return True
    print(f"no complete checkpoint in {folder}: starting from step 0")
    return None


def _write_resolved(
    folder: Path, config: RunConfig, arguments: "TreeTrainingArguments", overwrite: bool, is_resumed: bool
) -> None:
    from treewise.trainer.checkpoint import store

    resolved = folder / _RESOLVED
    try:
        if overwrite:
            store.recover(folder)
            for path in store.checkpoints(folder):
                store.remove(path)
            for path in (resolved, folder / FINISHED, folder / LOG):
                path.unlink(missing_ok=True)
            for name in _OF_ONLINE_RUNS:
                shutil.rmtree(folder / name, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        text = resolved_text(config, arguments)
        by_trainer = {item.name for item in dataclasses.fields(arguments)}  # it compares them with the checkpoint's
        if is_resumed and resolved.exists():
            try:
                changes = differences(_settings_of(folder), resolved_values(text.encode()))
            except ConfigError as error:
                changes = []
                print(error, file=sys.stderr)
            for change in changes:
                if change.partition(":")[0] not in by_trainer:
                    print(f"changed since this run began: {change}", file=sys.stderr)
        write_atomically(resolved, text)
    except OSError as error:
        named = "" if error.filename2 is None else f", {Path(error.filename2).name} of it"
        raise ConfigError(f"output_dir {folder}{named} cannot be written ({error.strerror}).") from error
