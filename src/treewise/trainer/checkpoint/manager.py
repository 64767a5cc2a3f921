"""Finds and saves the checkpoints of one run. A checkpoint is complete or absent, and belongs to one run."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treewise.base import features
from treewise.distributed import ranks
from treewise.errors import CheckpointError
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.checkpoint.contents import RunState, SavedSettings

logger = logging.getLogger("treewise")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint. max_tokens: the budget of the run that wrote it."""

    folder: Path
    step: int
    max_tokens: int | None


class CheckpointManager:
    """The checkpoints in the folder of a run. Every rank calls each method.

    run_facts: what identifies the run, as plain values, read when needed. verify: holds a folder with whole weights
    against the model in memory. It is called once: later checkpoints are written by the same code from the same model.
    """

    def __init__(
        self, args: SavedSettings, run_facts: Callable[[], dict[str, Any]], verify: Callable[[Path], None]
    ) -> None:
        self.args, self._run_facts, self._verify = args, run_facts, verify
        self._has_verified = False
        self.last_step = 0  # of the newest checkpoint that was written or resumed from

    def find(self, wanted: str | bool | None, *, may_begin: bool = False) -> ResumePoint | None:
        """The checkpoint to resume from: a path, or True for the newest complete one, or None for a new run. Rank 0
        reads and verifies it for all, and prints the settings that changed.

        may_begin: whether the run begins anew where there is none yet.

        Raises:
            CheckpointError: no such checkpoint, an incomplete or damaged one, one of another run, or settings that
                cannot change.
        """
        self.last_step = 0
        if not wanted:
            return None
        find = features.resume.find_checkpoint
        found = ranks.on_first_rank(lambda: find(self.args, wanted, self._run_facts(), may_begin=may_begin))
        if found is None:
            return None
        folder, manifest = found
        self.last_step = int(manifest["step"])
        budget = manifest.get("max_tokens")
        return ResumePoint(folder, self.last_step, int(budget) if budget else None)

    def save(self, run: RunState, run_dir: Path, max_tokens: int | None) -> None:
        """Writes a checkpoint, publishes it, and only then removes old ones.

        Raises:
            CheckpointError: a rank could not write, and `args.on_save_failure` is `stop`; or what was written is not
                the model in memory.
        """
        step, best = run.loop.global_step, run.loop.best_global_step
        if best and (best == step or (run_dir / f"checkpoint-{best}").is_dir()):
            run.loop.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
        facts = {"step": step, "max_tokens": max_tokens, **self._run_facts()}
        try:
            folder = contents.write(run, run_dir, facts)
        except CheckpointError as error:
            if self.args.on_save_failure == "stop":
                raise
            logger.error("%s The run goes on without it.", error)
            return
        if not self._has_verified and not ranks.on_first_rank((folder / contents.SHARDS).is_dir):
            self._verify(folder)
            self._has_verified = True
        if self.args.should_save:
            store.prune(run_dir, self.args.save_total_limit, run.loop.best_model_checkpoint)
        self.last_step = step
