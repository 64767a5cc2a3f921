"""Means of an objective's metrics: over what was computed since the last log, by loss weights; and over an epoch."""

import sys
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import torch
from transformers import TrainerCallback

from treewise.engine.scoring import StepOutput


class MetricMeans:
    """Sums of metrics and of what they are divided by. A rank without trees has none, and takes part all the same."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, out: StepOutput) -> None:
        """Takes the metrics of one call."""
        for name, value in out.metrics.items():
            held = self._sums.setdefault(name, [0.0, 0.0])
            held[0] += value * out.weight
            held[1] += out.weight

    def take(self, sum_over_ranks: Callable[..., list[float]]) -> dict[str, float]:
        """The means over all ranks; starts anew."""
        own, self._sums = self._sums, {}
        names = sorted(own)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            held: list[list[str] | None] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(held, names)
            names = sorted({name for part in held for name in part or ()})
        if not names:
            return {}
        values = sum_over_ranks(*(value for name in names for value in own.get(name, (0.0, 0.0))))
        pairs = zip(names, values[::2], values[1::2], strict=True)
        return {name: total / weight for name, total, weight in pairs if weight > 0}


class EpochMeans(TrainerCallback):
    """Prints one line an epoch: the means of its logged steps."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._logs.append({name: float(logs[name]) for name in self.names if name in logs})

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        held, self._logs = self._logs, []
        if not held or not state.is_world_process_zero:
            return
        names = [name for name in self.names if all(name in logs for logs in held)]
        means = ", ".join(f"{name} {fmean(logs[name] for logs in held):.4g}" for name in names)
        sys.stdout.write(f"epoch {round(state.epoch)}: {means} (mean of {len(held):,} steps)\n")
        sys.stdout.flush()
