"""Uploads of a run to the Hub: the files of verified checkpoints, and of the model at the end.

transformers' Trainer uploads the run's folder, whatever lies in it, with its settings pickled, and passes over uploads
that failed in the background. Here only files of the model are uploaded; a failure is a warning that says what to do,
and does not fail a run whose model is saved.
"""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from transformers import Trainer
from transformers.utils.hub import hf_api
from typing_extensions import override

from treewise.trainer.checkpoint.store import link_files

logger = logging.getLogger("treewise")

# Of a checkpoint: what a run goes on from, beside the model.
_OF_THE_RUN = ("optimizer*", "random_*", "schedule.json", "trainer_state.json", "treewise.json")
_WHOLE_MODELS = ("model*.safetensors", "adapter_model.safetensors")


class UploadingTrainer(Trainer):
    """A Trainer with uploads of its own, all from the first process.

    Attributes:
        model_files: of the run's folder, the names of the files that were saved as the model.
        uploaded: the commit of the model at the end; None before.
    """

    model_files: Sequence[str] = ()
    uploaded: CommitInfo | None = None
    _warns_of_shards = True

    @cached_property
    def _uploads(self) -> list[tuple[str, Future[Any]]]:
        """Those in the background, in order."""
        return []

    @cached_property
    def _hub(self) -> HfApi:
        """One client for all uploads: it runs those in the background one after another."""
        return hf_api()

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model, and with `push_to_hub` uploads it; an upload that fails is a warning."""
        super().save_model(output_dir, _internal_call=True)
        if self.args.push_to_hub and not _internal_call:
            later = f"hf upload {self.hub_model_id} {self.args.output_dir}, with --include for its files"
            _warning_if_it_fails(f"the model was not uploaded; later: {later}", lambda: self._upload("Model save"))

    @override
    def push_to_hub(self, commit_message: str | None = None, **card: object) -> CommitInfo | None:
        """Saves and uploads the model; the commit. card: of `create_model_card`."""
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.save_model(_internal_call=True)
        return self._upload(commit_message or "End of training", **card)

    def _upload(self, message: str, **card: object) -> CommitInfo | None:
        """Uploads the model in the run's folder, after what is in the background."""
        if not self.is_world_process_zero():
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.create_model_card(**{"model_name": str(self.hub_model_id).split("/")[-1], **card})
        self._finish_current_push()
        names = [*self.model_files, "README.md"]
        self.uploaded = self._commit(self.args.output_dir, message, allow_patterns=names)
        return self.uploaded

    def upload_checkpoint(self, checkpoint: Path) -> None:
        """Begins to upload a verified checkpoint as `args.hub_strategy` says: its model, and all of it."""
        if self.args.push_to_hub and self.is_world_process_zero():
            _warning_if_it_fails(f"{checkpoint.name} was not uploaded", lambda: self._begin_upload(checkpoint))

    def _begin_upload(self, checkpoint: Path) -> None:
        strategy = str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy))
        is_busy = any(not job.done() for _, job in self._uploads)
        if strategy == "end" or (is_busy and not self.args.hub_always_push):
            return
        self._warn_of_failures()
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        parts: list[tuple[str | None, list[Path]]] = []
        if any(fnmatch(path.name, pattern) for path in files for pattern in _WHOLE_MODELS):
            of_model = [path for path in files if not any(fnmatch(path.name, pattern) for pattern in _OF_THE_RUN)]
            parts.append((None, of_model))
        elif self._warns_of_shards:
            self._warns_of_shards = False
            logger.warning("push_to_hub: checkpoints of shards hold no whole model; the model at the end is uploaded.")
        if strategy in ("checkpoint", "all_checkpoints"):
            parts.append(("last-checkpoint" if strategy == "checkpoint" else checkpoint.name, files))
        for path_in_repo, own in parts:
            name = f".{checkpoint.name}.{path_in_repo or 'model'}.upload"
            folder = checkpoint.with_name(name)  # stays when the checkpoint is removed
            shutil.rmtree(folder, ignore_errors=True)
            link_files(os.link, checkpoint, [path.relative_to(checkpoint) for path in own], folder)
            message = f"Training in progress, {checkpoint.name}"
            job: Any = self._commit(folder, message, path_in_repo=path_in_repo, run_as_future=True)
            job.add_done_callback(lambda _, folder=folder: shutil.rmtree(folder, ignore_errors=True))
            self._uploads.append((checkpoint.name, job))

    def _commit(self, folder: Path | str, message: str, **options: object) -> CommitInfo:
        given = {"token": self.args.hub_token, "revision": self.args.hub_revision, **options}
        return self._hub.upload_folder(repo_id=self.hub_model_id, folder_path=folder, commit_message=message, **given)

    @override
    def _finish_current_push(self) -> None:
        for _, job in self._uploads:
            job.exception()
        self._warn_of_failures()

    def _warn_of_failures(self) -> None:
        done = [each for each in self._uploads if each[1].done()]
        for each in done:
            self._uploads.remove(each)
            _warning_if_it_fails(f"{each[0]} was not uploaded", each[1].result)


def _warning_if_it_fails(what: str, upload: Callable[[], object]) -> None:
    try:
        upload()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning("push_to_hub: %s (%s). The run and its files are complete without it.", what, reason)
