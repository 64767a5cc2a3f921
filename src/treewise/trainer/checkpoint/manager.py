"""Finds and saves the checkpoints of one run. A checkpoint is complete or absent, and belongs to one run."""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treewise.distributed import ranks
from treewise.errors import CheckpointError
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.checkpoint.contents import ARGUMENTS, RunState
from treewise.trainer.checkpoint.store import read_manifest

logger = logging.getLogger("treewise")

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


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A verified checkpoint. max_tokens: the budget of the run that wrote it."""

    folder: Path
    step: int
    max_tokens: int | None


class CheckpointManager:
    """The checkpoints in the folder of a run. Every rank calls each method.

    run_facts: what identifies the run, as plain values, read when needed."""

    def __init__(self, args: TreeTrainingArguments, run_facts: Callable[[], dict[str, Any]]) -> None:
        self.args, self._run_facts = args, run_facts
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
        found = ranks.on_first_rank(lambda: find_checkpoint(self.args, wanted, self._run_facts(), may_begin=may_begin))
        if found is None:
            return None
        folder, manifest = found
        self.last_step = int(manifest["step"])
        budget = manifest.get("max_tokens")
        return ResumePoint(folder, self.last_step, int(budget) if budget else None)

    def save(self, run: RunState, run_dir: Path, max_tokens: int | None) -> None:
        """Writes a checkpoint, publishes it, and only then removes old ones.

        Raises:
            CheckpointError: a rank could not write, and `args.on_save_failure` is `stop`.
        """
        step, best = run.loop.global_step, run.loop.best_global_step
        if best and (best == step or (run_dir / f"checkpoint-{best}").is_dir()):
            run.loop.best_model_checkpoint = str(run_dir / f"checkpoint-{best}")
        facts = {"step": step, "max_tokens": max_tokens, **self._run_facts()}
        try:
            contents.write(run, run_dir, facts)
        except CheckpointError as error:
            if self.args.on_save_failure == "stop":
                raise
            logger.error("%s The run goes on without it.", error)
            return
        if self.args.should_save:
            store.prune(run_dir, self.args.save_total_limit, run.loop.best_model_checkpoint)
        self.last_step = step
