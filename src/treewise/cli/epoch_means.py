"""One printed line for each epoch of an update, and a warning at its first step."""

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from transformers import TrainerCallback
from typing_extensions import override

from treewise.errors import num
from treewise.rl.checks import gap_warning


class EpochMeans(TrainerCallback):
    """Prints one line for each epoch: the means of its logged steps."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._logs: list[dict[str, float]] = []

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._logs.append({name: float(logs[name]) for name in self.names if name in logs})

    @override
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        steps, self._logs = self._logs, []
        if not steps or not state.is_world_process_zero:
            return
        names = [name for name in self.names if all(name in logs for logs in steps)]
        means = ", ".join(f"{name} {fmean(logs[name] for logs in steps):.4g}" for name in names)
        sys.stdout.write(f"epoch {round(state.epoch)}: {means} (mean of {num(len(steps), 'step')})\n")
        sys.stdout.flush()


class GapWarning(TrainerCallback):
    """Warns at the first step where the gap between policy and sampler is beyond a limit."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._is_done = False

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._is_done or not logs or "logprob_gap" not in logs:
            return
        self._is_done = True
        line = gap_warning(float(logs["logprob_gap"]), self._limit)
        if line is not None and state.is_world_process_zero:
            print(f"warning: {line}", file=sys.stderr)
