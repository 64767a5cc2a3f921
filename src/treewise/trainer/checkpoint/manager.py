"""Finds and saves the checkpoints of one run. A checkpoint is complete or absent, and belongs to one run.

With `async_checkpoints` a thread writes it while training goes on, as torchtitan's `async_mode: async` does. The state
is copied to host memory first (`contents.capture`), so a written checkpoint is that of its step. At most one is in
flight. Nothing else differs from a save that training waits for: files, manifest, and the rename at the end.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treewise.distributed import ranks
from treewise.distributed.online_placement import OnlinePlacer
from treewise.errors import CheckpointError
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.checkpoint.contents import RunState
from treewise.trainer.checkpoint.resumption import find_checkpoint
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
        self._in_flight: Future[Path] | None = None
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
        found = ranks.on_first_rank(lambda: find_checkpoint(self.args, wanted, self._run_facts(), may_begin=may_begin))
        if found is None:
            return None
        folder, manifest = found
        if self._placer is not None and manifest.get("costs"):
            self._placer.restore(manifest["costs"])
        if self._tree_order is not None:
            self._tree_order.restore(manifest.get("tree_order") or {})
        self.last_step = int(manifest["step"])
        budget = manifest.get("max_tokens")
        return ResumePoint(folder, self.last_step, int(budget) if budget else None)

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
            self._in_flight = _in_thread(lambda: write(saved))
            return None

        return self._published(begin)

    def collect(self, *, wait: bool) -> Path | None:
        """The checkpoint that a thread has written meanwhile, once; None where there is none.

        wait: for one that is in flight.

        Raises:
            CheckpointError: it could not be written, and `args.on_save_failure` is `stop`.
        """
        flight = self._in_flight
        if flight is None or not (wait or all(ranks.on_every_rank(flight.done))):
            return None
        self._in_flight = None
        return self._published(flight.result)

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


def _in_thread(work: Callable[[], Path]) -> Future[Path]:
    """The result of `work`, or its error, from a daemon: a process that ends by an error of another one does not wait
    for a disk, as it would for the threads of an executor.
    """
    future: Future[Path] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="treewise-checkpoint", daemon=True).start()
    return future
