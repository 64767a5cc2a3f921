"""What a run prints: one line a step. The log file has every number.

    step 3/50  loss 1.87  |g| 2.3  lr 9e-06  270 tok/s  0.70 GiB  ETA 0:40

`log.jsonl` in the run's folder has one line of JSON for each log: all that trackers get, numbers as numbers.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from typing_extensions import override

from treewise.base.durable import own_file
from treewise.base.own_files import read_own
from treewise.cli.run_folder import LOG
from treewise.errors import duration, num
from treewise.rl.checks import gap_warning

# What a line shows of a log.
_SHOWN = {
    "loss": "loss {:.4g}",
    "grad_norm": "|g| {:.3g}",
    "learning_rate": "lr {:.3g}",
    "kl": "kl {:.3g}",
    "approx_kl": "kl to old {:.3g}",
    "clip_fraction": "clipped {:.3g}",
    "entropy": "entropy {:.3g}",
    "ratio": "ratio {:.3g}",
    "logprob_gap": "gap {:.3g}",
    "tokens_per_second_tree": "{:,.0f} tok/s",
}
Logs = Mapping[str, float] | None
MAX_SECONDS = 100 * 3600  # of an ETA


def step_line(logs: Mapping[str, Any], step: int, max_steps: int, seconds_left: float | None) -> str:
    """One line of a step, from its log. seconds_left: of the run; None where it is not known yet."""
    parts = [f"step {step:,}/{max_steps:,}"]
    parts += [form.format(logs[name]) for name, form in _SHOWN.items() if isinstance(logs.get(name), int | float)]
    if isinstance(logs.get("memory_bytes"), int | float):
        parts.append(f"{logs['memory_bytes'] / 2**30:.2f} GiB")
    if seconds_left is not None and step < max_steps and seconds_left < MAX_SECONDS:
        parts.append(f"ETA {duration(seconds_left)}")
    return "  ".join(parts)


class StepLines(TrainerCallback):
    """Prints a line for each log, and writes the whole log to a file in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / LOG
        self._began, self._first_step = 0.0, 0

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._began, self._first_step = time.monotonic(), state.global_step
        if state.is_world_process_zero:  # what was logged after the step from which the run goes on is left out
            is_resumed = self._log.exists() and state.global_step
            lines = read_own(self._log, _log_lines, "move it away") if is_resumed else []
            steps = [_step_of(line) for line in lines]
            if num_damaged := steps[:-1].count(None):  # the last may have been cut off by a kill
                sys.stderr.write(f"{self._log}: {num(num_damaged, 'line')} of it damaged, and left out\n")
            kept = [
                line
                for line, step in zip(lines, steps, strict=True)
                if step is not None and step <= state.global_step and '"train_runtime"' not in line
            ]
            with own_file(self._log, "w") as stream:
                stream.write("".join(f"{line}\n" for line in kept))

    @override
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Logs = None, **kwargs: object
    ) -> None:
        if not logs or not state.is_world_process_zero:
            return
        entry = {"step": state.global_step, **logs}
        with own_file(self._log, "a") as stream:
            stream.write(json.dumps(entry, default=float) + "\n")
        if "loss" in logs:
            done = state.global_step - self._first_step
            left = (time.monotonic() - self._began) / done * (state.max_steps - state.global_step) if done else None
            line = step_line(logs, state.global_step, state.max_steps, left)
        elif "eval_loss" in logs:
            line = f"step {state.global_step:,}/{state.max_steps:,}  eval loss {logs['eval_loss']:.4g}"
        elif "train_runtime" in logs:
            line = f"trained {num(state.global_step, 'step')} in {duration(logs['train_runtime'])}"
        else:
            return
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class EpochMeans(TrainerCallback):
    """Prints one line for each epoch: the means of its logged steps."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._logs: list[dict[str, float]] = []

    @override
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Logs = None, **kwargs: object
    ) -> None:
        if logs and "loss" in logs:
            self._logs.append({name: float(logs[name]) for name in self.names if name in logs})

    @override
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
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
    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Logs = None, **kwargs: object
    ) -> None:
        if self._is_done or not logs or "logprob_gap" not in logs:
            return
        self._is_done = True
        line = gap_warning(float(logs["logprob_gap"]), self._limit)
        if line is not None and state.is_world_process_zero:
            print(f"warning: {line}", file=sys.stderr)


def _log_lines(data: bytes) -> list[str]:
    return data.decode("utf-8", errors="replace").splitlines()


def _step_of(line: str) -> float | None:
    """The step of a line of the log; None of a damaged line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
