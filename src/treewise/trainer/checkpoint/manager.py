"""Finds and saves the checkpoints of one run. A checkpoint is complete or absent, and belongs to one run.

With `async_checkpoints` a thread writes it while training goes on, as torchtitan's `async_mode: async` does. The state
is copied to host memory first (`contents.capture`), so a written checkpoint is that of its step. At most one is in
flight. Nothing else differs from a save that training waits for: files, manifest, and the rename at the end.
"""

import json
import logging
import sys
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
from treewise.trainer.checkpoint.contents import ARGUMENTS, RunState
from treewise.trainer.checkpoint.store import read_manifest

# -- Which checkpoint a run goes on from, and what changed since it was saved -----------------------------------------


# Where a run writes and what it is called, and what transformers finds out by itself.
_UNIMPORTANT = {
    *("output_dir", "run_name", "project", "hub_token", "local_rank", "resume_from_checkpoint", "disable_tqdm"),
    *("do_train", "do_eval", "do_predict", "debug", "log_level", "log_level_replica", "use_cache"),
}
_OPTIMIZER = "the optimizer's saved state was made with the former value"
_BEST = "the best checkpoint so far was chosen by the former value"
_OF_OPTIMIZERS = ("optim_args", "optim_target_modules")
_OF_THE_BEST = ("metric_for_best_model", "greater_is_better")
# Schedules that keep the rate as a part of their state, which no setting of another run can be put into.
_STATEFUL_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
_OF_SCHEDULES = ("learning_rate", "warmup_steps", "lr_scheduler_kwargs")


def find_checkpoint(
    args: TreeTrainingArguments, wanted: str | bool, facts: dict[str, Any], *, may_begin: bool
) -> tuple[Path, dict[str, Any]] | None:
    """A verified checkpoint of this run, a path or the newest complete one (True), and its manifest. Prints why newer
    ones were passed over, and the settings that changed.

    facts: what the run is, by which its steps train the same trees. may_begin: None where there is none yet.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, one of another run, or settings that cannot change.
    """
    found, passed_over = store.newest(args.output_dir) if wanted is True else (Path(str(wanted)), [])
    for reason in passed_over:
        sys.stderr.write(f"passed over: {reason}\n")
    if found is None and may_begin:
        return None
    if found is None:
        because = f" ({passed_over[0]})" if passed_over else ""
        raise CheckpointError(f"{args.output_dir}: no complete checkpoint to resume from{because}.")
    manifest = read_manifest(found)
    _check_same_run(found, manifest, facts)
    for change in _check_settings(found, args):
        sys.stderr.write(f"changed since {found.name}: {change}\n")
    return found, manifest


def _check_same_run(checkpoint: Path, manifest: dict[str, Any], facts: dict[str, Any]) -> None:
    """Checks that the steps after this checkpoint train the trees that an uninterrupted run would.

    Raises:
        CheckpointError: other data (both fingerprints are named), another model, another seed or another number of
            trees per step.
    """
    for name, now in facts.items():
        then = manifest.get(name)
        if then == now:
            continue
        if name == "data":
            raise CheckpointError(
                f"{checkpoint} was trained on other data: fingerprint {then}, now {now}. "
                "Restore the data (same records, same order, same rendering), or start a new run from its weights."
            )
        if name == "model":
            raise CheckpointError(f"{checkpoint} was made with the model {then}, now {now}.")
        hint = ""
        if name == "trees_per_step":
            hint = " It is per_device_train_batch_size x gradient_accumulation_steps x processes: change another one."
        raise CheckpointError(
            f"{checkpoint} was made with {name}={then!r}, now {now!r}; resumed steps would train on other trees.{hint}"
        )


def _check_settings(checkpoint: Path, args: TreeTrainingArguments) -> list[str]:
    """A line for each setting that changed: `learning_rate: 0.01 -> 0.02`.

    Raises:
        CheckpointError: settings that cannot change in the middle of a run; names all of them.
    """
    then = json.loads((checkpoint / ARGUMENTS).read_text(encoding="utf-8"))
    now = json.loads(json.dumps(args.to_dict(), default=str))
    names = [name for name in now if name in then and name not in _UNIMPORTANT]
    changes = {name: (then[name], now[name]) for name in names if then[name] != now[name]}
    reasons = {name: _OPTIMIZER for name in _OF_OPTIMIZERS if name in changes}
    reasons |= {name: _BEST for name in _OF_THE_BEST if name in changes and then[name] is not None}
    schedule = str(then.get("lr_scheduler_type"))
    if schedule in _STATEFUL_SCHEDULES:
        reason = f"a {schedule} schedule continues from the saved rate"
        reasons |= {name: reason for name in _OF_SCHEDULES if name in changes}
    if reasons:
        parts = [f"{name}: {changes[name][0]} -> {changes[name][1]} ({reason})" for name, reason in reasons.items()]
        raise CheckpointError(
            f"{checkpoint} cannot go on with {'; '.join(parts)}. Resume with the former values, or start a new run "
            "from its weights."
        )
    return [f"{name}: {old} -> {new}" for name, (old, new) in changes.items()]


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
    that a resumed run places as before. published: is given each checkpoint once it is complete.
    """

    def __init__(
        self,
        args: TreeTrainingArguments,
        run_facts: Callable[[], dict[str, Any]],
        placer: OnlinePlacer | None = None,
        published: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self._on_published = published
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
