"""Uploads of a run to the Hub: the files of the model at the end.

transformers' Trainer uploads the run's folder, whatever lies in it, with its settings pickled, and passes over uploads
that failed. Here only files of the model are uploaded, by the first process; a failure at the end of a run is a warning
that says what to do, and does not fail a run whose model is saved.
"""

import logging
from typing import TYPE_CHECKING

from huggingface_hub import CommitInfo

from treewise.nn.platform.releases import hub_api

if TYPE_CHECKING:
    from treewise.trainer.trainer import TreeTrainer

logger = logging.getLogger("treewise")


def upload_at_the_end(trainer: "TreeTrainer") -> CommitInfo | None:
    """Uploads the model that a trainer has saved; its commit. None where that failed, which is a warning."""
    try:
        return upload(trainer, "Model save")
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning(
            "push_to_hub: the model was not uploaded; later: hf upload %s %s, with --include for its files (%s). "
            "The run and its files are complete without it.",
            *(trainer.hub_model_id, trainer.args.output_dir, reason),
        )
        return None


def upload(trainer: "TreeTrainer", message: str, **card: object) -> CommitInfo | None:
    """Uploads the files of the model that a trainer has saved (`model_files`); its commit. card: of
    `create_model_card`."""
    if not trainer.is_world_process_zero():
        return None
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    trainer.create_model_card(**{"model_name": str(trainer.hub_model_id).split("/")[-1], **card})
    commit: CommitInfo = hub_api().upload_folder(
        repo_id=trainer.hub_model_id,
        folder_path=trainer.args.output_dir,
        commit_message=message,
        token=trainer.args.hub_token,
        revision=trainer.args.hub_revision,
        allow_patterns=[*trainer.model_files, "README.md"],
    )
    return commit
