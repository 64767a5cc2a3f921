"""Checks of settings that transformers accepts, but that fail later or train nothing."""

import math
from typing import TYPE_CHECKING

from treewise.errors import ConfigError

if TYPE_CHECKING:
    from treewise.trainer import TreeTrainingArguments

# Setting: least value, what it must stay below, and the same in words.
_RANGES: dict[str, tuple[float, float, str]] = {
    "seed": (0, 2**32, "an integer from 0 to 4294967295"),
    "data_seed": (0, 2**32, "an integer from 0 to 4294967295"),
    "learning_rate": (0, math.inf, "at least 0"),
    "weight_decay": (0, math.inf, "at least 0"),
    "adam_beta1": (0, 1, "at least 0 and below 1"),
    "adam_beta2": (0, 1, "at least 0 and below 1"),
    "adam_epsilon": (0, math.inf, "at least 0"),
    "spike_factor": (0, math.inf, "at least 0 (0: never)"),
    "max_grad_norm": (0, math.inf, "at least 0 (0: no clipping)"),
}


def check_settings(arguments: "TreeTrainingArguments") -> None:
    """Checks ranges of values, the length of the run, and that the packages of optimizer and trackers are there.

    Raises:
        ConfigError: a value out of its range, a run of no steps, an optimizer or tracker whose package is missing.
    """
    from transformers import Trainer
    from transformers.integrations import get_reporting_integration_callbacks

    for name, (least, limit, words) in _RANGES.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value < limit:
            raise ConfigError(f"{name} is {value:g}; it must be {words}.")
    if arguments.max_steps < -1:
        raise ConfigError(f"max_steps is {arguments.max_steps}; give a number of steps, or -1 for no limit.")
    if arguments.max_steps <= 0 and not arguments.num_train_epochs > 0:
        raise ConfigError(f"num_train_epochs is {arguments.num_train_epochs:g}: nothing would be trained.")
    if arguments.constant is not None and arguments.normalization not in ("rollout_sum", "constant"):
        raise ConfigError(
            f"constant={arguments.constant:g} has no effect where normalization is {arguments.normalization!r}; "
            "leave it out, or give normalization: rollout_sum or constant."
        )
    metric = arguments.metric_for_best_model
    if metric is not None and metric not in ("loss", "eval_loss"):
        raise ConfigError(f"metric_for_best_model is {metric!r}; an evaluation measures eval_loss alone.")
    try:
        for tracker in get_reporting_integration_callbacks(arguments.report_to):
            tracker()  # raises where its package is missing
    except (ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(f"report_to: {' '.join(str(error).split())}") from error
    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments)
    except (ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optim {arguments.optim}: {' '.join(str(error).split())}") from error
