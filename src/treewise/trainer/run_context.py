"""What holds around a whole training run: the lock of its folder, signals, the watch over other processes."""

import json
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from treewise.distributed import ranks
from treewise.distributed.signals import StopSignals
from treewise.distributed.watchdog import watching
from treewise.engine.profiling import Profile, Recording, mean
from treewise.errors import StoppedError
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.checkpoint import store
from treewise.trainer.run_lock import RunLock

logger = logging.getLogger("treewise")


@contextmanager
def entered_run(args: TreeTrainingArguments, signals: StopSignals) -> Iterator[None]:
    """Locks the run's folder, removes unfinished checkpoints of a killed run, handles signals, watches the other ranks.

    Raises:
        ConfigError: another run holds the folder, or it cannot be written.
        LostRankError: another process of the run is gone, or does not answer.
    """

    def enter_folder() -> None:
        stack.enter_context(RunLock(args.output_dir))
        for line in store.recover(args.output_dir):
            logger.warning("%s", line)

    with ExitStack() as stack:
        ranks.on_first_rank(enter_folder)
        stack.enter_context(watching(args.ddp_timeout))
        stack.enter_context(signals)
        yield


def stop_of_all(signals: StopSignals) -> bool:
    """Whether any rank has received a signal to stop; all ranks call this at the same step; then all hold it."""
    numbers = ranks.on_every_rank(lambda: signals.received)
    signals.received = next((number for number in numbers if number is not None), None)
    return signals.received is not None


def stopped_error(signals: StopSignals, what: str) -> StoppedError:
    """The error that ends a run after a signal. what: where the run stopped, and what of it is saved."""
    number = signals.received or signal.SIGINT
    error = StoppedError(f"{signal.Signals(number).name}: {what}")
    error.exit_code = 128 + number
    return error


class StepEnd(TrainerCallback):
    """After each step: calls `end_step`, and stops all ranks if any of them has received a signal."""

    def __init__(self, signals: StopSignals, end_step: Callable[[int], None]) -> None:
        self._signals, self._end_step = signals, end_step

    @override
    def on_step_end(
        self, args: TreeTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._end_step(state.global_step)
        if stop_of_all(self._signals):
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False


# -- `profile: true`: where the time of steps 3 to 5 of a run goes, written into its folder ---------------------------


FILE, TRACE = "profile.json", "profile_trace.json"
FIRST, LAST = 3, 5  # steps, counted from 1 in each start of a run; the first two measure, probe and allocate


class StepProfiler(TrainerCallback):
    """Writes `profile.json`, the mean step by part, and `profile_trace.json`, the Chrome trace of the last one.

    On the first rank. A step lasts from its first batch to the optimizer's end; saving is not in it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._num_begun = 0
        self._recording: Recording | None = None
        self._profiles: list[Profile] = []

    @override
    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._num_begun += 1
        if state.is_world_process_zero and FIRST <= self._num_begun <= LAST:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._recording = Recording(args.device)

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        self._profiles.append(recording.stop(self._folder / TRACE if self._num_begun == LAST else None))
        (self._folder / FILE).write_text(json.dumps(asdict(mean(self._profiles)), indent=1) + "\n")

    @override
    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.is_world_process_zero and not self._profiles:
            logger.warning(f"profile: the run ended before step {FIRST}; nothing was profiled.")
