"""Uploads a run's model to the Hub: the files of verified checkpoints, and of the model at the end.

transformers' Trainer uploads the run's folder, whatever lies in it, and passes over uploads that failed in the
background. Here only files of the model are uploaded; a failure is a warning that says what to do, and does not fail
a run whose model is saved.
"""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers.utils.hub import hf_api

from treewise.trainer.arguments import TreeTrainingArguments

logger = logging.getLogger("treewise")

# Of a checkpoint: what a run goes on from, beside the model.
_OF_THE_RUN = ("optimizer*", "random_*", "schedule.json", "trainer_state.json", "treewise.json")
_WHOLE_MODELS = ("model*.safetensors", "adapter_model.safetensors")


class HubUploads:
    """The uploads of one run, of which rank 0 alone makes use."""

    def __init__(self, args: TreeTrainingArguments) -> None:
        self._args = args
        self._jobs: list[tuple[str, Future[Any]]] = []  # in the background, in order
        self._tells_of_shards = True
        self.commit: Any = None  # of the model at the end

    @cached_property
    def _api(self) -> Any:
        """One client for all uploads: it runs those in the background one after another."""
        return hf_api()

    def checkpoint(self, repo: str, checkpoint: Path) -> None:
        """Begins to upload a verified checkpoint as `args.hub_strategy` says: its model, and all of it."""
        with warning(f"{checkpoint.name} was not uploaded"):
            self._checkpoint(repo, checkpoint)

    def _checkpoint(self, repo: str, checkpoint: Path) -> None:
        strategy = str(getattr(self._args.hub_strategy, "value", self._args.hub_strategy))
        is_busy = any(not job.done() for _, job in self._jobs)
        if strategy == "end" or (is_busy and not self._args.hub_always_push):
            return
        self._warn_of_failures()
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        if any(fnmatch(path.name, pattern) for path in files for pattern in _WHOLE_MODELS):
            of_model = [path for path in files if not any(fnmatch(path.name, pattern) for pattern in _OF_THE_RUN)]
            self._begin(repo, checkpoint, of_model, None)
        elif self._tells_of_shards:
            self._tells_of_shards = False
            logger.warning("push_to_hub: checkpoints of shards hold no whole model; the model at the end is uploaded.")
        if strategy in ("checkpoint", "all_checkpoints"):
            self._begin(repo, checkpoint, files, "last-checkpoint" if strategy == "checkpoint" else checkpoint.name)

    def model(self, repo: str, names: Sequence[str], message: str, **options: Any) -> Any:
        """Uploads files of the run's folder; the commit. options: of `HfApi.upload_folder`."""
        self.finish()
        self.commit = self._api.upload_folder(
            repo_id=repo,
            folder_path=self._args.output_dir,
            allow_patterns=list(names),
            commit_message=message,
            **{"token": self._args.hub_token, "revision": self._args.hub_revision, **options},
        )
        return self.commit

    def finish(self) -> None:
        """Waits for the uploads in the background."""
        for _, job in self._jobs:
            job.exception()
        self._warn_of_failures()

    def _begin(self, repo: str, checkpoint: Path, files: Sequence[Path], path_in_repo: str | None) -> None:
        folder = _linked(
            checkpoint, files, checkpoint.with_name(f".{checkpoint.name}.{path_in_repo or 'model'}.upload")
        )
        job = self._api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            path_in_repo=path_in_repo,
            commit_message=f"Training in progress, {checkpoint.name}",
            token=self._args.hub_token,
            revision=self._args.hub_revision,
            run_as_future=True,
        )
        job.add_done_callback(lambda _: shutil.rmtree(folder, ignore_errors=True))
        self._jobs.append((checkpoint.name, job))

    def _warn_of_failures(self) -> None:
        for name, job in self._jobs:
            if job.done() and job.exception() is not None:
                _warn(f"{name} was not uploaded", job.exception())
        self._jobs = [each for each in self._jobs if not each[1].done()]


@contextmanager
def warning(what: str) -> Iterator[None]:
    """Logs an upload that fails."""
    try:
        yield
    except Exception as error:
        _warn(what, error)


def _warn(what: str, error: BaseException | None) -> None:
    reason = " ".join(str(error).split()) or type(error).__name__
    logger.warning("push_to_hub: %s (%s). The run and its files are complete without it.", what, reason)


def _linked(checkpoint: Path, files: Sequence[Path], folder: Path) -> Path:
    """A folder of the same files, which stay when the checkpoint is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in files:
        target = folder / path.relative_to(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, target)
    return folder
