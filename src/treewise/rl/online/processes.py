"""What the processes of an online run have to agree on: the folder, the weights that all begin with, and a server."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from treewise.distributed import ranks
from treewise.distributed.watchdog import Watchdog
from treewise.rl.samplers import Sampler, TransformersSampler
from treewise.trainer import TreeTrainingArguments
from treewise.trainer.checkpoint import store
from treewise.trainer.run_lock import RunLock

logger = logging.getLogger("treewise")


@contextmanager
def entered(folder: Path, args: TreeTrainingArguments) -> Iterator[None]:
    """Locks the run's folder, removes what a killed run left unfinished, and watches the other processes.

    Raises:
        ConfigError: another run holds the folder, or it cannot be written.
        LostRankError: another process of the run is gone, or does not answer.
    """

    def enter_folder() -> None:
        stack.enter_context(RunLock(folder))
        for line in store.recover(folder):
            logger.warning("%s", line)

    with ExitStack() as stack:
        ranks.on_first_rank(enter_folder)
        watch = stack.enter_context(Watchdog())
        stack.enter_context(watch.explaining(args.ddp_timeout))
        yield


def same_weights(model: nn.Module) -> None:
    """Copies the first process's parameters and buffers to all."""
    if ranks.count() == 1:
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            distributed.broadcast(tensor.data, src=0)


def hand_over(sampler: Sampler, model: Any) -> None:
    """Gives new weights to the sampler: each process to its own; a server gets them from the first process alone."""
    if ranks.own() == 0 or isinstance(sampler, TransformersSampler):
        sampler.update(model)
    ranks.on_first_rank(lambda: None)  # the others wait until a server has them
