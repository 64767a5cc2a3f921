"""The batches of a step with all that the host computes for them, one step ahead of the model.

While a step computes, a thread loads the trees of the next one, merges them, places them on ranks, plans them under the
present budget, and computes the terms of their loss; during the last step of an epoch those of the next epoch's first.
Which trees, in which order, is up to the sampler alone, which orders an epoch by its seed and number; weights, random
generators and everything that a checkpoint records are left as they are, so a run that is killed and resumed trains
what it would have trained. The first step of a run waits for its trees: nothing computes before it.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from operator import length_hint
from typing import TypeVar

from treewise.engine.prepared import PreparedForest
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.tree.forest import Forest

Batches = Iterator[list[Forest]]
Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """This rank's trees of a batch, with what its step needs of them.

    denominators: of each tree, by the objective. ready: all trees with a trained token as one, planned; None without
    any. flops: of tree and flat training; None where not counted.
    """

    forests: tuple[Forest, ...]
    denominators: tuple[float, ...]
    ready: PreparedForest | None
    flops: tuple[float, float] | None = None


class PreparedSteps:
    """This rank's batches of each optimizer step, the next step's prepared in a thread while the caller computes.

    Parameters:
        prepare: maps the index of a step and the trees of a batch to this rank's prepared batch.
        args: `gradient_accumulation_steps` batches make a step (the last of an epoch may have fewer); without
            `prepare_ahead` each step is prepared when it is asked for, in the caller's thread.
        epoch_from: begins the epoch whose first step has an index, and returns the iterator that the caller will give
            for it; None at the end of a run. Without it each epoch begins with the caller's first step of it.
    """

    def __init__(
        self,
        prepare: Callable[[int, list[Forest]], PreparedBatch],
        args: TreeTrainingArguments,
        epoch_from: Callable[[int], Batches | None] | None = None,
    ) -> None:
        self._prepare, self._epoch_from = prepare, epoch_from
        self._batches_per_step, self._is_ahead = args.gradient_accumulation_steps, args.prepare_ahead
        self._epoch: Batches | None = None  # of the step that comes next
        self._steps: Generator[list[PreparedBatch], None, None] | None = None

    def next_step(self, epoch: Batches, step: int) -> list[PreparedBatch]:
        """The batches of the next step; none at the end of an epoch. An error of theirs is raised here.

        epoch: the same iterator for each step of an epoch. step: index of the first step that is taken from it.
        """
        if self._steps is None or self._epoch is not epoch:
            self._close()
            self._epoch = epoch
            if self._is_ahead:
                self._steps = prefetched(self._steps_of_epochs(epoch, step), self._batches_of)
            else:
                self._steps = (self._batches_of((epoch, each)) for each in count(step))
        return next(self._steps, [])

    def _steps_of_epochs(self, epoch: Batches | None, step: int) -> Iterator[tuple[Batches, int]]:
        """Epoch and index of each step. Runs in the caller's thread, one step ahead: before the last step of an epoch
        is handed out, the next epoch begins.
        """
        while epoch is not None:
            self._epoch, num_batches = epoch, length_hint(epoch, -1)
            num_steps = None if num_batches < 0 else -(-num_batches // self._batches_per_step)
            for each in islice(count(step), num_steps):
                yield epoch, each
            step += num_steps or 0
            epoch = None if self._epoch_from is None else self._epoch_from(step)

    def _batches_of(self, item: tuple[Batches, int]) -> list[PreparedBatch]:
        epoch, step = item
        return [self._prepare(step, batch) for batch in islice(epoch, self._batches_per_step)]

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Around a run: ends the thread after it, once that is done with the step that it prepares."""
        try:
            yield
        finally:
            self._close()

    def _close(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._epoch = self._steps = None


def prefetched(items: Iterable[Given], make: Callable[[Given], Made]) -> Generator[Made, None, None]:
    """`make(item)` of each item in order, the next one in a thread while the caller uses this one.

    One item is taken from `items` ahead of the one in use, always in the caller's thread, so a data loader need not be
    safe for threads. Results are those of a plain loop, as long as `make` depends on its item alone: it must neither
    draw from a shared random generator nor touch the device. An error of `make` or of `items` is raised in place
    of its own result, with its traceback. Leaving the loop early waits for the result in progress and drops it.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="treewise-prefetch") as thread:
        waiting = _next(iterator, make, thread)
        while waiting is not None:
            result = waiting.result()
            waiting = _next(iterator, make, thread)
            yield result


def _next(iterator: Iterator[Given], make: Callable[[Given], Made], thread: ThreadPoolExecutor) -> Future[Made] | None:
    """The next result, in progress; None if there are no more items. An error of `items` becomes that result."""
    try:
        item = next(iterator)
    except StopIteration:
        return None
    except Exception as error:
        failed: Future[Made] = Future()
        failed.set_exception(error)
        return failed
    return thread.submit(make, item)
