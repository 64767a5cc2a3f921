"""The batches of a step with all that the host computes for them, one step ahead of the model.

While a step computes, a thread loads the trees of the next one, merges them, places them on ranks, plans them under the
present budget, and computes the terms of their loss. Which trees, in which order, is up to the sampler alone; weights,
random generators and everything that a checkpoint records are left as they are, so a run that is killed and resumed
trains what it would have trained.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import overload

from treewise.distributed.online_placement import OnlinePlacer
from treewise.distributed.prefetch import prefetched
from treewise.engine.prepared import PreparedForest
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.tree.forest import Forest


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch(Sequence[Forest]):
    """This rank's trees of a batch, with what its step needs of them.

    denominators: of each tree, by the objective. ready: all trees with a trained token as one, planned; None without
    any. flops: of tree and flat training; None where not counted.
    """

    forests: tuple[Forest, ...]
    denominators: tuple[float, ...]
    ready: PreparedForest | None
    flops: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self.forests)

    @overload
    def __getitem__(self, index: int) -> Forest: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Forest, ...]: ...

    def __getitem__(self, index: int | slice) -> Forest | tuple[Forest, ...]:
        return self.forests[index]


class PreparedSteps:
    """This rank's batches of each optimizer step, the next step's prepared in a thread while the caller computes.

    Parameters:
        prepare: maps this rank's trees of a batch to a prepared batch.
        args: `gradient_accumulation_steps` batches make a step (the last of an epoch may have fewer); without
            `prepare_ahead` each step is prepared when it is asked for, in the caller's thread.
        placer: takes this rank's part of each batch; None: a batch is this rank's as it is.
    """

    def __init__(
        self,
        prepare: Callable[[list[Forest]], PreparedBatch],
        args: TreeTrainingArguments,
        placer: OnlinePlacer | None = None,
    ) -> None:
        self._prepare, self._placer = prepare, placer
        self._batches_per_step, self._is_ahead = args.gradient_accumulation_steps, args.prepare_ahead
        self._epoch: Iterator[list[Forest]] | None = None
        self._steps: Generator[list[PreparedBatch], None, None] | None = None

    def next_step(self, epoch: Iterator[list[Forest]], step: int) -> list[PreparedBatch]:
        """The batches of the next step; none at the end of an epoch. An error of theirs is raised here.

        epoch: the same iterator for each step of an epoch. step: index of the first step that is taken from it.
        """
        if self._steps is None or self._epoch is not epoch:
            self._close()

            def batches_of(step: int) -> list[PreparedBatch]:
                return [self._prepared(step, batch) for batch in islice(epoch, self._batches_per_step)]

            self._epoch = epoch
            steps = count(step)
            self._steps = prefetched(steps, batches_of) if self._is_ahead else (batches_of(each) for each in steps)
        return next(self._steps)

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

    def _prepared(self, step: int, batch: list[Forest]) -> PreparedBatch:
        return self._prepare(batch if self._placer is None else self._placer.own_part(step, batch))
