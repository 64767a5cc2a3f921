"""What changed between the settings that a checkpoint was saved with and those of the run that resumes it.

Nearly all settings apply from the next step on. Those that the saved state cannot follow are errors by name.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treewise.errors import CheckpointError
from treewise.trainer.arguments import TreeTrainingArguments

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


def changed_settings(then: dict[str, Any], args: TreeTrainingArguments) -> dict[str, tuple[Any, Any]]:
    """Old and new value of every setting that differs. then: the settings as a checkpoint holds them."""
    now = json.loads(json.dumps(args.to_dict(), default=str))
    names = [name for name in now if name in then and name not in _UNIMPORTANT]
    return {name: (then[name], now[name]) for name in names if then[name] != now[name]}


def check_settings(checkpoint: Path, settings_file: str, args: TreeTrainingArguments) -> list[str]:
    """A line for each setting that changed: `learning_rate: 0.01 -> 0.02`.

    Raises:
        CheckpointError: settings that cannot change in the middle of a run; names all of them.
    """
    then = json.loads((checkpoint / settings_file).read_text(encoding="utf-8"))
    changes = changed_settings(then, args)
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


@contextmanager
def saved_intervals_ignored() -> Iterator[None]:
    """transformers takes the intervals of logs, evaluations and saves over from a checkpoint, and warns where they
    differ. A run here has its own, which it sets afterwards; so the warning would be wrong.
    """
    logger = logging.getLogger("transformers.trainer_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
