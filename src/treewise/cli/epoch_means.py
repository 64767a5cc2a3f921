"""One printed line for each epoch."""

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from transformers import TrainerCallback
from typing_extensions import override


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
        sys.stdout.write(f"epoch {round(state.epoch)}: {means} (mean of {len(steps):,} steps)\n")
        sys.stdout.flush()
