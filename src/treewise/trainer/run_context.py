"""What holds around a whole training run: the lock of its folder, signals, the watch over other processes."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from transformers import TrainerCallback, TrainerControl, TrainerState
from typing_extensions import override

from treewise.distributed import ranks
from treewise.distributed.signals import StopSignals
from treewise.distributed.watchdog import watching
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
