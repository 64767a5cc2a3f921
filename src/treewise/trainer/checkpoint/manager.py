"""Finds and saves the checkpoints of one run. A checkpoint is complete or absent, and belongs to one run."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treewise.distributed import ranks
from treewise.distributed.online_placement import OnlinePlacer
from treewise.errors import CheckpointError
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.checkpoint.background import BackgroundWriter
from treewise.trainer.checkpoint.changed_settings import check_settings
from treewise.trainer.checkpoint.contents import RunState
from treewise.trainer.checkpoint.manifest import check_same_run, read_manifest
from treewise.trainer.data_loader import TreeOrder

logger = logging.getLogger("treewise")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint. max_tokens: the budget of the run that wrote it."""

    folder: Path
    step: int
    max_tokens: int | None


class CheckpointManager:
    """The checkpoints in the folder of a run. Every rank calls each method.

    run_facts: what identifies the run, as plain values, read when needed. placer: its costs are kept in checkpoints, so
    that a resumed run places as before. tree_order: its measurements are, too, so that it orders as before.
    published: is given each checkpoint once it is complete.
    """

    def __init__(
        self,
        args: TreeTrainingArguments,
        run_facts: Callable[[], dict[str, Any]],
        placer: OnlinePlacer | None = None,
        tree_order: TreeOrder | None = None,
        published: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self._tree_order, self._on_published = tree_order, published
        self.args, self._run_facts, self._placer = args, run_facts, placer
        self.last_step = 0  # of the newest checkpoint that was written or resumed from
        self._writer = BackgroundWriter()
        self._thread_group: Any = None

    def find(self, wanted: str | bool | None, *, may_begin: bool = False) -> ResumePoint | None:
        """The checkpoint to resume from: a path, or True for the newest complete one, or None for a new run. Rank 0
        reads and verifies it for all, and prints the settings that changed; the placer takes its costs over.

        may_begin: whether the run begins anew where there is none yet.

        Raises:
            CheckpointError: no such checkpoint, an incomplete or damaged one, one of another run, or settings that
                cannot change.
        """
        self.last_step = 0
        if not wanted:
            return None
        found = ranks.on_first_rank(lambda: self._verified(wanted, may_begin=may_begin))
        if found is None:
            return None
        folder, manifest = found
        if self._placer is not None and manifest.get("costs"):
            self._placer.restore(manifest["costs"])
        if self._tree_order is not None:
            self._tree_order.restore(manifest.get("tree_order") or {})
        self.last_step = int(manifest["step"])
        budget = manifest.get("max_tokens")
        return ResumePoint(Path(folder), self.last_step, int(budget) if budget else None)

    def save(self, run: RunState, run_dir: Path, max_tokens: int | None) -> Path | None:
        """Writes a checkpoint, publishes it, and only then removes old ones; None where it failed and may fail, or
        where a thread writes it (`async_checkpoints`): then `collect` returns it. No other may be in flight.

        Raises:
            CheckpointError: a rank could not write, and `args.on_save_failure` is `stop`.
        """
        step, asynchronous = run.loop.global_step, self.args.async_checkpoints
        best = run.loop.best_global_step
        if best and (best == step or (run_dir / f"checkpoint-{best}").is_dir()):
            run.loop.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
        facts = {"step": step, "max_tokens": max_tokens, **self._run_facts()}
        if self._tree_order is not None:
            facts |= {"tree_order": self._tree_order.state()}
        if self._placer is not None:
            self._placer.before_save(step)
            facts |= {"costs": self._placer.state(), "num_ranks": ranks.count()}
        best_folder = run.loop.best_model_checkpoint
        if asynchronous and self._thread_group is None:
            self._thread_group = ranks.group_for_threads(self.args.ddp_timeout)

        def write(saved: contents.Captured) -> Path:
            checkpoint = contents.write(saved, run_dir, facts, self._thread_group if asynchronous else None)
            if self.args.should_save:
                store.prune(run_dir, self.args.save_total_limit, best_folder)
            return checkpoint

        def begin() -> Path | None:
            saved = contents.capture(run, run_dir, copies=asynchronous)
            if not asynchronous:
                return write(saved)
            self._writer.start(lambda: write(saved))
            return None

        return self._published(begin)

    def collect(self, *, wait: bool) -> Path | None:
        """The checkpoint that a thread has written meanwhile, once; None where there is none.

        wait: for one that is in flight.

        Raises:
            CheckpointError: it could not be written, and `args.on_save_failure` is `stop`.
        """
        if not self._writer.is_busy or not (wait or self._writer.is_done()):
            return None
        return self._published(self._writer.result)

    @contextmanager
    def flight_ended(self) -> Iterator[None]:
        """Waits in the end for a checkpoint in flight, also where the work inside failed: its error counts then."""
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self.collect(wait=True)
            raise

    def _published(self, work: Callable[[], Path | None]) -> Path | None:
        try:
            checkpoint = work()
        except CheckpointError as error:
            if self.args.on_save_failure == "stop":
                raise
            logger.error("%s The run goes on without it.", error)
            return None
        if checkpoint is not None:
            self.last_step = store.step_of(checkpoint)
            self._on_published(checkpoint)
        return checkpoint

    def _verified(self, wanted: str | bool, *, may_begin: bool) -> tuple[str, dict[str, Any]] | None:
        if wanted is True:
            newest, passed_over = store.newest(self.args.output_dir)
            for reason in passed_over:
                sys.stderr.write(f"passed over: {reason}\n")
            if newest is None and may_begin:
                return None
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
