"""Goes on from a checkpoint: which one, what may have changed since, and the states of a run that are read from it."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from treewise.distributed import ranks
from treewise.errors import CheckpointError
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.contents import ARGUMENTS, SCHEDULE, TEMPLATE_DATES, SavedSettings, random_file
from treewise.trainer.checkpoint.json_values import from_plain
from treewise.trainer.checkpoint.load_optimizer import load_optimizer
from treewise.trainer.checkpoint.optimizer_state import OPTIMIZER
from treewise.trainer.checkpoint.store import listed_files, read_manifest
from treewise.trainer.checkpoint.weights import load_weights

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
    args: SavedSettings, wanted: str | bool, facts: dict[str, Any], *, may_begin: bool
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
        if then == now or name == TEMPLATE_DATES:
            continue
        if name == "data":
            days, today = manifest.get(TEMPLATE_DATES), facts.get(TEMPLATE_DATES)
            why = (
                f" The chat template writes today's date, then {days}, now {today}: set template_date." if days else ""
            )
            raise CheckpointError(
                f"{checkpoint} was trained on other data: fingerprint {then}, now {now}.{why} "
                "Restore the data (same records, same order, same rendering), or start a new run from its weights."
            )
        if name == "model":
            raise CheckpointError(
                f"{checkpoint} was made with the model {then}, now {now}. Resume with the former model and adapters, "
                "or start a new run from its weights."
            )
        hint = ""
        if name == "template_date":
            hint = f" The chat template writes it as today's date: set template_date to {then}."
        if name == "trees_per_step":
            hint = " It is per_device_train_batch_size x gradient_accumulation_steps x processes: change another one."
        raise CheckpointError(
            f"{checkpoint} was made with {name}={then!r}, now {now!r}; resumed steps would train on other trees.{hint}"
        )


def _check_settings(checkpoint: Path, args: SavedSettings) -> list[str]:
    """A line for each setting that changed: `learning_rate: 0.01 -> 0.02`.

    Raises:
        CheckpointError: settings that cannot change in the middle of a run; names all of them.
    """
    then: dict[str, object] = json.loads((checkpoint / ARGUMENTS).read_text(encoding="utf-8"))
    now: dict[str, object] = json.loads(json.dumps(args.to_dict(), default=str))
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


# -- its states -------------------------------------------------------------------------------------------------------


def load_run(checkpoint: Path, model: Any, optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Weights, optimizer, schedule and random generators as they were between two steps. Raises as `load_states`."""
    load_weights(model, checkpoint)
    load_states(checkpoint, model, optimizer, scheduler)
    load_random_state(checkpoint)


def load_states(checkpoint: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Optimizer and schedule of a checkpoint, with the settings of this run where they differ (`optimizer_state`).

    Raises:
        CheckpointError: a checkpoint of weights alone, of another optimizer, or of another kind of schedule.
    """
    with listed_files(checkpoint) as folder:
        try:
            if not (folder / f"{OPTIMIZER}.json").is_file():
                raise CheckpointError(
                    "holds a model without its optimizer (save_only_model); start a new run from its weights."
                )
            load_optimizer(folder, optimizer, model)
            _load_schedule(folder, scheduler, optimizer)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint}: {error}") from error


def _load_schedule(folder: Path, scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Loads a schedule, and sets the learning rates of the next step.

    Schedules that are functions of the step's number (all of transformers' but two) go on by the settings of this run:
    its rate, warm-up and length. Others go on from their state.

    Raises:
        CheckpointError: another kind of schedule, or another rate in one that goes on from its state.
    """
    saved = json.loads((folder / SCHEDULE).read_text(encoding="utf-8"))
    state, kind = from_plain(saved["state"]), type(scheduler).__name__
    if saved["kind"] != kind:
        raise CheckpointError(
            f"lr_scheduler_type: {saved['kind']} -> {kind}: the saved state does not fit another schedule. "
            "Resume with the former, or start a new run from the checkpoint's weights."
        )
    own: list[float] = list(getattr(scheduler, "base_lrs", ()))
    if isinstance(scheduler, LambdaLR):
        rates = [base * rule(state["last_epoch"]) for base, rule in zip(own, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state |= {"base_lrs": own, "_last_lr": rates}
    elif own != list(state.get("base_lrs", own)):
        raise CheckpointError(
            f"learning rate: {state['base_lrs']} -> {own}: a {kind} continues from the saved rate. Resume with the "
            "former, or start a new run from the checkpoint's weights."
        )
    scheduler.load_state_dict(state)


def load_random_state(checkpoint: Path) -> None:
    """The random generators of this rank, if there was such a rank. Only callbacks depend on them: the order of steps
    has a generator of its own, and dropout is an error.
    """
    with listed_files(checkpoint) as folder:
        path = folder / random_file(ranks.own())
        state = from_plain(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    if state is not None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        torch.random.set_rng_state(state["torch"])
        if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
