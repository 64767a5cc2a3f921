"""Which trees a step trains: a pure function of the data, the seed, the epoch and the step.

Ranks, workers and gradient accumulation only cut that set into parts; they never change it.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from treewise.errors import DataError
from treewise.tree.forest import Forest
from treewise.tree.trajectory import STREAMS, Trajectory


class TreeSampler(BatchSampler):
    """Indices of the trees in each batch of one rank. Batches together are every tree exactly once, never more.

    A batch of all ranks is `batch_size * num_ranks` trees in a row of the epoch's order; the last one may be smaller,
    so that a rank may get fewer trees than others, or none.
    """

    def __init__(self, num_trees: int, batch_size: int, seed: int | None, rank: int = 0, num_ranks: int = 1) -> None:
        self.num_trees, self.batch_size, self.seed = num_trees, batch_size, seed
        self.rank, self.num_ranks = rank, num_ranks
        self.drop_last = False
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order; transformers calls this before each epoch."""
        self.epoch = epoch

    def order(self) -> np.ndarray:
        """[trees] int64, all trees in the order of this epoch. Without a seed: as they are."""
        if self.seed is None:
            return np.arange(self.num_trees)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_trees)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        width = self.batch_size * self.num_ranks
        for start in range(0, self.num_trees, width):
            yield order[start : start + width][self.rank :: self.num_ranks].tolist()

    def __len__(self) -> int:
        return math.ceil(self.num_trees / (self.batch_size * self.num_ranks))


class TreeLoader(DataLoader):
    """A loader of forests. It draws from a generator of its own: making one must not move anybody else's numbers."""

    sampler_of_trees: TreeSampler

    def __init__(self, dataset: Any, sampler: TreeSampler, merges: bool, **options: Any) -> None:
        super().__init__(
            _Items(dataset),
            batch_sampler=sampler,
            collate_fn=partial(collate, merges=merges),
            generator=torch.Generator().manual_seed(0),
            **options,
        )
        self.sampler_of_trees = sampler

    def set_epoch(self, epoch: int) -> None:
        """Hands the epoch to the sampler."""
        self.sampler_of_trees.set_epoch(epoch)


class _Items(torch.utils.data.Dataset):
    """Any indexable, as torch wants it."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def collate(items: Sequence[Any], merges: bool) -> list[Forest]:
    """The forests of a batch; one alone where their trajectories may be merged. No tree gives no forest."""
    if not items:
        return []
    if merges and len(items) > 1:
        held = [_trajectories(item) for item in items]
        if all(trajectories is not None for trajectories in held):
            return [Forest.from_trajectories([each for trajectories in held for each in trajectories or ()])]
    return [forest_of(item) for item in items]


def forest_of(item: Any) -> Forest:
    """The tree of one item of a dataset.

    Raises:
        DataError: the item is nothing that holds trajectories.
    """
    if isinstance(item, Forest):
        return item
    if hasattr(item, "forest"):
        forest: Forest = item.forest()
        return forest
    if isinstance(item, Trajectory):
        return Forest.from_trajectories([item])
    if isinstance(item, list | tuple):
        return Forest.from_trajectories(item)
    raise DataError(
        f"a dataset item is a {type(item).__name__}; give Forest, a list of Trajectory, or what load_trees returns."
    )


def _trajectories(item: Any) -> Sequence[Trajectory] | None:
    """The trajectories of an item that may be merged with those of others; None for a tree whose nodes must stay."""
    if isinstance(item, Trajectory):
        return [item]
    if isinstance(item, list | tuple):
        return item
    if hasattr(item, "trajectories"):
        held: Sequence[Trajectory] | None = item.trajectories
        return held
    return forest_of(item).trajectories


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What a data set holds. `fingerprint` changes whenever the trained content or its order does.

    num_longest_tokens, longest_source: length of the longest trajectory, and where it came from.
    """

    fingerprint: str
    num_trees: int
    num_trajectories: int
    num_tree_tokens: int
    num_flat_tokens: int
    num_leaf_tokens: int
    num_longest_tokens: int = 0
    longest_source: str = ""


def survey(dataset: Any) -> DataFacts:
    """One pass over all trees. Uses the data set's own `fingerprint` where it has one."""
    known = getattr(dataset, "fingerprint", None)
    digest = hashlib.sha256()
    counts = np.zeros(4, dtype=np.int64)
    longest, source = 0, ""
    for index in range(len(dataset)):
        forest = forest_of(dataset[index])
        counts += (forest.num_trajectories, forest.num_tokens, forest.num_flat_tokens, forest.num_leaf_tokens)
        number = int(forest.path_lengths.argmax())
        if forest.path_lengths[number] > longest:
            longest = int(forest.path_lengths[number])
            source = forest.trajectories[number].source if forest.trajectories else f"item {index}"
        if not isinstance(known, str):
            _hash_forest(digest, forest)
    fingerprint = known if isinstance(known, str) else digest.hexdigest()
    trajectories, tree_tokens, flat_tokens, leaf_tokens = map(int, counts)
    return DataFacts(fingerprint, len(dataset), trajectories, tree_tokens, flat_tokens, leaf_tokens, longest, source)


def _hash_forest(digest: Any, forest: Forest) -> None:
    if forest.trajectories is None:
        arrays = [forest.token_ids, forest.parent, *(forest.tree_streams[name] for name in sorted(forest.tree_streams))]
    else:
        arrays = [
            value
            for item in forest.trajectories
            for value in (item.token_ids, *(getattr(item, name) for name in STREAMS))
            if value is not None
        ]
    digest.update(b"tree")
    for array in arrays:
        digest.update(f"{array.dtype}{len(array)}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
