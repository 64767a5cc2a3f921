"""Which trees a step trains, with all that the host computes for them, one step ahead of the model.

Which trees is a pure function of the data, the seed, the epoch and the step: ranks, workers and gradient accumulation
only divide that set, they never change it. While a step computes, a thread loads the trees of the next one, merges
them, places them on ranks, plans them under the present budget, and computes the terms of their loss; during the last
step of an epoch those of the next epoch's first. Weights, random generators and everything that a checkpoint records
are left as they are, so a run that is killed and resumed trains what it would have trained. The first step of a run
waits for its trees: nothing computes before it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override

from treewise.engine.prepared import PreparedForest
from treewise.errors import ConfigError
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.tree.forest import Forest, forest_of
from treewise.tree.trajectory import Trajectory


class TreeSampler(BatchSampler):
    """Indices of the trees in each batch of one rank. Batches together are every tree exactly once, never more.

    A batch of all ranks is `batch_size * num_ranks` trees in a row of the epoch's order; the last one may be smaller,
    so that a rank may get fewer trees than others, or none. With `num_steps` the order is cut into so many
    optimizer steps instead, whose sizes differ by one at most, and each of them into `batches_per_step` batches.
    """

    def __init__(
        self,
        num_trees: int,
        batch_size: int,
        seed: int | None,
        rank: int = 0,
        num_ranks: int = 1,
        num_steps: int | None = None,
        batches_per_step: int = 1,
    ) -> None:
        self.num_trees, self.batch_size, self.seed = num_trees, batch_size, seed
        self.num_steps, self.batches_per_step = num_steps, batches_per_step
        self.rank, self.num_ranks = rank, num_ranks
        self.drop_last = False
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order; transformers calls this before each epoch."""
        self.epoch = epoch

    def order(self) -> np.ndarray:
        """[trees] int64, all trees in the order of this epoch, drawn by the seed, or without one as they are."""
        if self.seed is None:
            return np.arange(self.num_trees)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_trees)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        width = self.batch_size * self.num_ranks
        if self.num_steps is None:
            batches = [order[start : start + width] for start in range(0, self.num_trees, width)]
        else:
            steps = np.array_split(order, self.num_steps)
            batches = [batch for step in steps for batch in np.array_split(step, self.batches_per_step)]
        for batch in batches:
            yield batch[self.rank :: self.num_ranks].tolist()

    def __len__(self) -> int:
        if self.num_steps is not None:
            return self.num_steps * self.batches_per_step
        return math.ceil(self.num_trees / (self.batch_size * self.num_ranks))


class TreeLoader(DataLoader):
    """A loader of forests, with a random generator of its own, so that the global generators are left unchanged."""

    def __init__(
        self, args: TreeTrainingArguments, dataset: Sequence[Any], sampler: TreeSampler, objective: object
    ) -> None:
        options: dict[str, Any] = {"num_workers": args.dataloader_num_workers}
        if args.dataloader_num_workers:
            options["prefetch_factor"] = args.dataloader_prefetch_factor
            options["multiprocessing_context"] = args.dataloader_multiprocessing_context
        super().__init__(
            dataset,  # type: ignore[arg-type]
            batch_sampler=sampler,
            collate_fn=partial(collate, merges=args.merges_trees(objective)),
            generator=torch.Generator().manual_seed(0),
            **options,
        )
        self.sampler_of_trees, self.num_trees = sampler, sampler.num_trees
        self._begun: tuple[int, Iterator[list[Forest]]] | None = None  # epoch and its iterator

    def set_epoch(self, epoch: int) -> None:
        self.sampler_of_trees.set_epoch(epoch)

    def begin_next_epoch(self) -> Iterator[list[Forest]]:
        """The iterator that `iter` is going to return for the next epoch; the present one has its order already."""
        self.set_epoch(self.sampler_of_trees.epoch + 1)
        begun = super().__iter__()
        self._begun = self.sampler_of_trees.epoch, begun
        return begun

    @override
    def __iter__(self) -> Iterator[list[Forest]]:  # type: ignore[override]
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == self.sampler_of_trees.epoch:
            return begun[1]
        return super().__iter__()


def collate(items: Sequence[Any], merges: bool) -> list[Forest]:
    """The forests of a batch; a single one if `merges` and their trajectories can be merged. May be empty."""
    if merges and len(items) > 1:
        trajectories = [trajectories_of_item(item) for item in items]
        if all(own is not None for own in trajectories):
            tree_of = [tree for tree, own in enumerate(trajectories) for _ in own or ()]  # that experts are taken in
            return [Forest.from_trajectories([item for own in trajectories for item in own or ()], tree_of=tree_of)]
    return [forest_of(item) for item in items]


def joined_batches(
    batches: Sequence[list[Forest]], args: TreeTrainingArguments, objective: object
) -> list[list[Forest]]:
    """The batches of a step; the first of them with the trees of all, and the others empty, where they are computed as
    one. Recorded experts stay in the batches that they came in, whose trees say what a missing one may be.
    """
    forests = [forest for batch in batches for forest in batch]
    if len(batches) < 2 or not args.joins_batches or any(forest.has_routes for forest in forests):
        return list(batches)
    return [collate(forests, args.merges_trees(objective)), *([] for _ in batches[1:])]


def trajectories_of_item(item: object) -> Sequence[Trajectory] | None:
    """The trajectories of an item that may be merged with those of others; None for a tree that must stay as it is."""
    if isinstance(item, Trajectory):
        return [item]
    if isinstance(item, list | tuple):
        return item
    trajectories: Sequence[Trajectory] | None = (
        item if hasattr(item, "trajectories") else forest_of(item)
    ).trajectories
    return trajectories


def make_sampler(args: TreeTrainingArguments, num_trees: int) -> TreeSampler:
    """The order of the training trees: of this rank, or of all ranks where trees are placed on ranks later."""
    facts = args.order_facts()
    seed = facts["seed"] if facts["shuffle"] else None
    if args.steps_per_epoch is not None and args.steps_per_epoch > num_trees:
        raise ConfigError(f"steps_per_epoch={args.steps_per_epoch}: give 1 to {num_trees}, the number of trees.")
    steps = (args.steps_per_epoch, args.gradient_accumulation_steps)
    size = args.per_device_train_batch_size
    if args.places_trees:
        return TreeSampler(num_trees, size * args.data_size, seed, 0, 1, *steps)
    return TreeSampler(num_trees, size, seed, args.data_index, args.data_size, *steps)


# -- batches with what the host computes for them ---------------------------------------------------------------------


Batches = Iterator[list[Forest]]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """This rank's trees of a batch, with what its step needs of them.

    denominator: of all of them together, by the objective. ready: all as one, planned; None without a trained token.
    flops: of tree and flat training; None where they are not counted or not known.
    """

    forests: tuple[Forest, ...]
    denominator: float
    ready: PreparedForest | None
    flops: tuple[float, float] | None = None


class PreparedSteps:
    """This rank's batches of each optimizer step, the next step's prepared in a thread while the caller computes.

    Parameters:
        prepare: maps the trees of each batch of a step to this rank's prepared batches.
        args: `gradient_accumulation_steps` batches make a step (the last of an epoch may have fewer); without
            `prepare_ahead` each step is prepared when it is asked for, in the caller's thread.
        epoch_from: begins the epoch whose first step has an index, and returns the iterator that the caller will give
            for it; None at the end of a run. Without it each epoch begins with the caller's first step of it.
    """

    def __init__(
        self,
        prepare: Callable[[list[list[Forest]]], list[PreparedBatch]],
        args: TreeTrainingArguments,
        epoch_from: Callable[[int], Batches | None] | None = None,
    ) -> None:
        self._prepare, self._epoch_from = prepare, epoch_from
        self._batches_per_step, self._is_ahead = args.gradient_accumulation_steps, args.prepare_ahead
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: Future[list[PreparedBatch]] | None = None  # the step that comes next
        self._epoch: Batches | None = None  # that it is taken from
        self._end: int | None = None  # the step after that epoch's last one; None: unknown
        self._over: Batches | None = None  # the epoch whose last step was taken

    def next_step(self, epoch: Batches, step: int) -> list[PreparedBatch]:
        """The batches of the next step; none at the end of an epoch. An error of theirs is raised here.

        epoch: the same iterator for each step of an epoch. step: index of the first step that is taken from it.
        """
        if not self._is_ahead:
            return self._batches_of(epoch)
        if self._over is epoch:
            return []
        if self._waiting is None or self._epoch is not epoch:
            self._close()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="treewise-prefetch")
            self._begin(epoch, step)
        waiting, self._waiting = self._waiting, None
        assert waiting is not None
        batches = waiting.result()
        if step + 1 != self._end:
            self._submit()
            return batches
        self._over = epoch
        if self._epoch_from is not None and (following := self._epoch_from(step + 1)) is not None:
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
        return self._prepare([*islice(epoch, self._batches_per_step)])

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
