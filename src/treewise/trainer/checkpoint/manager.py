"""Finds and saves the checkpoints of one run. A checkpoint is complete or absent, and belongs to one run."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treewise.distributed import ranks
from treewise.distributed.online_placement import OnlinePlacer
from treewise.errors import CheckpointError
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.checkpoint.changed_settings import check_settings
from treewise.trainer.checkpoint.contents import RunState
from treewise.trainer.checkpoint.manifest import check_same_run, read_manifest
from treewise.trainer.data_loader import DataFacts
from treewise.trainer.tree_order import TreeOrder

logger = logging.getLogger("treewise")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint. max_tokens: the budget of the run that wrote it."""

    folder: Path
    step: int
    max_tokens: int | None


class CheckpointManager:
    """The checkpoints in the folder of a run. Every rank calls each method.

    model: `contents.fingerprint` of the model. data: sizes and fingerprint of the training data, read when needed.
    placer: its costs are kept in checkpoints, so that a resumed run places as before. tree_order: its measurements
    are, too, so that it orders as before.
    """

    def __init__(
        self,
        args: TreeTrainingArguments,
        model: str,
        data: Callable[[], DataFacts],
        placer: OnlinePlacer | None = None,
        tree_order: TreeOrder | None = None,
    ) -> None:
        self._tree_order = tree_order
        self.args, self.model = args, model
        self._data, self._placer = data, placer
        self.last_step = 0  # of the newest checkpoint that was written or resumed from

    def find(self, wanted: str | bool | None) -> ResumePoint | None:
        """The checkpoint to resume from: a path, or True for the newest complete one, or None for a new run. Rank 0
        reads and verifies it for all, and prints the settings that changed; the placer takes its costs over.

        Raises:
            CheckpointError: no such checkpoint, an incomplete or damaged one, one of another run, or settings that
                cannot change.
        """
        self.last_step = 0
        if not wanted:
            return None
        folder, manifest = ranks.on_first_rank(lambda: self._verified(wanted))
        if self._placer is not None and manifest.get("costs"):
            self._placer.restore(manifest["costs"])
        if self._tree_order is not None:
            self._tree_order.restore(manifest.get("tree_order") or {})
        self.last_step = int(manifest["step"])
        budget = manifest.get("max_tokens")
        return ResumePoint(Path(folder), self.last_step, int(budget) if budget else None)

    def save(self, run: RunState, run_dir: Path, max_tokens: int | None) -> Path | None:
        """Writes a checkpoint, publishes it, and only then removes old ones; None where it failed and may fail.

        Raises:
            CheckpointError: a rank could not write, and `args.on_save_failure` is `stop`.
        """
        step = run.loop.global_step
        best = run.loop.best_global_step
        if best and (best == step or (run_dir / f"checkpoint-{best}").is_dir()):
            run.loop.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
        facts = {"step": step, "max_tokens": max_tokens, **self._run_facts()}
        if self._tree_order is not None:
            facts |= {"tree_order": self._tree_order.state()}
        if self._placer is not None:
            self._placer.before_save(step)
            facts |= {"costs": self._placer.state(), "num_ranks": ranks.count()}
        try:
            checkpoint = contents.save(run, run_dir, facts)
        except CheckpointError as error:
            if self.args.on_save_failure == "stop":
                raise
            logger.error("%s The run goes on without it.", error)
            return None
        self.last_step = step
        if self.args.should_save:
            store.prune(run_dir, self.args.save_total_limit, run.loop.best_model_checkpoint)
        return checkpoint

    def _verified(self, wanted: str | bool) -> tuple[str, dict[str, Any]]:
        if wanted is True:
            newest, passed_over = store.newest(self.args.output_dir)
            for reason in passed_over:
                sys.stderr.write(f"passed over: {reason}\n")
            if newest is None:
                because = f" ({passed_over[0]})" if passed_over else ""
                raise CheckpointError(f"{self.args.output_dir}: no complete checkpoint to resume from{because}.")
        else:
            newest = Path(str(wanted))
        manifest = read_manifest(newest)
        check_same_run(newest, manifest, self._run_facts())
        for change in check_settings(newest, contents.ARGUMENTS, self.args):
            sys.stderr.write(f"changed since {newest.name}: {change}\n")
        return str(newest), manifest

    def _run_facts(self) -> dict[str, Any]:
        data = self._data()
        own = {"data": data.fingerprint, "num_trees": data.num_trees, "model": self.model, **self.args.order_facts()}
        return own | {"curriculum": None if self._tree_order is None else self._tree_order.description}
