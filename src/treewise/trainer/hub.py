"""Uploads of a run to the Hub: the files of the model at the end.

transformers' Trainer uploads the run's folder, whatever lies in it, with its settings pickled, and passes over uploads
that failed. Here only files of the model are uploaded; a failure is a warning that says what to do, and does not fail a
run whose model is saved.
"""

import logging
from collections.abc import Sequence

from huggingface_hub import CommitInfo
from transformers import Trainer
from transformers.utils.hub import hf_api
from typing_extensions import override

logger = logging.getLogger("treewise")


class UploadingTrainer(Trainer):
    """A Trainer with uploads of its own, all from the first process.

    Attributes:
        model_files: of the run's folder, the names of the files that were saved as the model.
        uploaded: the commit of the model at the end; None before.
    """

    model_files: Sequence[str] = ()
    uploaded: CommitInfo | None = None

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model, and with `push_to_hub` uploads it; an upload that fails is a warning."""
        super().save_model(output_dir, _internal_call=True)
        if not self.args.push_to_hub or _internal_call:
            return
        try:
            self._upload("Model save")
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.warning(
                "push_to_hub: the model was not uploaded; later: hf upload %s %s, with --include for its files (%s). "
                "The run and its files are complete without it.",
                *(self.hub_model_id, self.args.output_dir, reason),
            )

    @override
    def push_to_hub(self, commit_message: str | None = None, **card: object) -> CommitInfo | None:
        """Saves and uploads the model; the commit. card: of `create_model_card`."""
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.save_model(_internal_call=True)
        return self._upload(commit_message or "End of training", **card)

    def _upload(self, message: str, **card: object) -> CommitInfo | None:
        if not self.is_world_process_zero():
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.create_model_card(**{"model_name": str(self.hub_model_id).split("/")[-1], **card})
        self.uploaded = hf_api().upload_folder(
            repo_id=self.hub_model_id,
            folder_path=self.args.output_dir,
            commit_message=message,
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            allow_patterns=[*self.model_files, "README.md"],
        )
        return self.uploaded
