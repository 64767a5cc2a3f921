"""The batches of a step with all that the host computes for them, one step ahead of the model.

While a step computes, a thread loads the trees of the next one, merges them, places them on ranks, plans them under the
present budget, and computes the terms of their loss; during the last step of an epoch those of the next epoch's first.
Which trees, in which order, is up to the sampler alone, which orders an epoch by its seed and number; weights, random
generators and everything that a checkpoint records are left as they are, so a run that is killed and resumed trains
what it would have trained. The first step of a run waits for its trees: nothing computes before it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import length_hint

from treewise.engine.prepared import PreparedForest
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.tree.forest import Forest

Batches = Iterator[list[Forest]]


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
        prepare: maps the trees of a batch to this rank's prepared batch.
        args: `gradient_accumulation_steps` batches make a step (the last of an epoch may have fewer); without
            `prepare_ahead` each step is prepared when it is asked for, in the caller's thread.
        epoch_from: begins the epoch whose first step has an index, and returns the iterator that the caller will give
            for it; None at the end of a run. Without it each epoch begins with the caller's first step of it.
    """

    def __init__(
        self,
        prepare: Callable[[list[Forest]], PreparedBatch],
        args: TreeTrainingArguments,
        epoch_from: Callable[[int], Batches | None] | None = None,
    ) -> None:
        self._prepare, self._epoch_from = prepare, epoch_from
        self._batches_per_step, self._is_ahead = args.gradient_accumulation_steps, args.prepare_ahead
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: Future[list[PreparedBatch]] | None = None  # the step that comes next
        self._epoch: Batches | None = None  # that it is taken from
        self._end: int | None = None  # the step after that epoch's last one; None: unknown

    def next_step(self, epoch: Batches, step: int) -> list[PreparedBatch]:
        """The batches of the next step; none at the end of an epoch. An error of theirs is raised here.

        epoch: the same iterator for each step of an epoch. step: index of the first step that is taken from it.
        """
        if not self._is_ahead:
            return self._batches_of(epoch)
        if self._waiting is None or self._epoch is not epoch:
            self._close()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="treewise-prefetch")
            self._begin(epoch, step)
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        batches = waiting.result()
        if step + 1 != self._end:
            self._submit()
        elif self._epoch_from is not None and (following := self._epoch_from(step + 1)) is not None:
            self._begin(following, step + 1)
        return batches

    def _begin(self, epoch: Batches, step: int) -> None:
        num_batches = length_hint(epoch, -1)
        self._epoch, self._end = epoch, None if num_batches < 0 else step - (-num_batches // self._batches_per_step)
        self._submit()

    def _submit(self) -> None:
        assert self._thread is not None
        assert self._epoch is not None
        self._waiting = self._thread.submit(self._batches_of, self._epoch)

    def _batches_of(self, epoch: Batches) -> list[PreparedBatch]:
        return [self._prepare(batch) for batch in islice(epoch, self._batches_per_step)]

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Around a run: ends the thread after it, once that is done with the step that it prepares."""
        try:
            yield
        finally:
            self._close()

    def _close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._thread = self._waiting = self._epoch = None
