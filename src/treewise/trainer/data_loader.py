"""Which trees a step trains: a pure function of the data, the seed, the epoch and the step.

Ranks, workers and gradient accumulation only divide that set; they never change it.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override

from treewise.data import RenderOptions, load_trees
from treewise.data.sources import is_raw_data
from treewise.distributed.online_placement import OnlinePlacer, costs_of_flops
from treewise.errors import ConfigError, busy_with, num, tell_progress
from treewise.nn.model_flops import flop_model
from treewise.objectives import SFT, Objective
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.tree.forest import Forest, forest_of
from treewise.tree.trajectory import Trajectory, update_with_content

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    def __init__(self, args: TreeTrainingArguments, dataset: Sequence[Any], sampler: TreeSampler) -> None:
        options: dict[str, Any] = {"num_workers": args.dataloader_num_workers}
        if args.dataloader_num_workers:
            options["prefetch_factor"] = args.dataloader_prefetch_factor
            options["multiprocessing_context"] = args.dataloader_multiprocessing_context
        super().__init__(
            dataset,  # type: ignore[arg-type]
            batch_sampler=sampler,
            collate_fn=partial(collate, merges=args.merges_trees),
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
        trajectories = [_trajectories(item) for item in items]
        if all(each is not None for each in trajectories):
            return [Forest.from_trajectories([item for each in trajectories for item in each or ()])]
    return [forest_of(item) for item in items]


def _trajectories(item: object) -> Sequence[Trajectory] | None:
    """The trajectories of an item that may be merged with those of others; None for a tree that must stay as it is."""
    if isinstance(item, Trajectory):
        return [item]
    if isinstance(item, list | tuple):
        return item
    trajectories: Sequence[Trajectory] | None = (
        item if hasattr(item, "trajectories") else forest_of(item)
    ).trajectories
    return trajectories


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Sizes and identity of a data set. `fingerprint` changes whenever the trained content or its order does.

    num_longest_tokens, longest_source: length of the longest trajectory, and its source. num_images: image
    spans of all trees.
    """

    fingerprint: str
    num_trees: int
    num_trajectories: int
    num_tree_tokens: int
    num_flat_tokens: int
    num_leaf_tokens: int
    num_longest_tokens: int = 0
    longest_source: str = ""
    num_images: int = 0


def as_trees(
    name: str,
    dataset: object,
    tokenizer: "PreTrainedTokenizerBase | None",
    render: RenderOptions | Mapping[str, object] | None,
) -> Any:
    """A data set of trees, loaded where records are given. Raises `ConfigError` for an empty one, or something else."""
    if dataset is None:
        return None
    if name == "eval_dataset" and isinstance(dataset, dict):
        return {key: as_trees(f"eval_dataset[{key!r}]", value, tokenizer, render) for key, value in dataset.items()}
    if is_raw_data(dataset):
        return load_trees(dataset, tokenizer, options=render)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(f"{name} is a {type(dataset).__name__}, which has no length and indices; give a list.")
    if len(dataset) == 0:
        raise ConfigError(f"{name} is empty.")
    return dataset


def check_preferences(dataset: object, objective: Objective) -> None:
    """Raises `ConfigError` where SFT would imitate the rejected completions of preference data."""
    report = getattr(dataset, "report", None)
    num_preferences = getattr(report, "num_preferences", 0)
    if report is not None and num_preferences and isinstance(objective, SFT):
        raise ConfigError(
            f"{num_preferences:,} of {num(report.num_records, 'record')}: preference pairs or labelled completions; "
            "SFT would imitate the rejected ones. Give objective dpo, ipo or kto, or data of chosen ones alone."
        )


@busy_with("merging trees")
def survey(dataset: Sequence[Any]) -> DataFacts:
    """One pass over all trees. Uses the data set's own `fingerprint` if it has one."""
    known = getattr(dataset, "fingerprint", None)
    digest = hashlib.sha256()
    counts = np.zeros(5, dtype=np.int64)
    num_longest, source = 0, ""
    for index in range(len(dataset)):
        tell_progress("merging trees", index, len(dataset), "tree")
        forest = forest_of(dataset[index])
        counts += (
            *(forest.num_trajectories, forest.num_tokens, forest.num_flat_tokens, forest.num_leaf_tokens),
            len(forest.images),
        )
        longest = int(forest.path_lengths.argmax())
        if forest.path_lengths[longest] > num_longest:
            num_longest = int(forest.path_lengths[longest])
            source = forest.trajectories[longest].source or f"item {index}"
        if isinstance(known, str):
            continue
        tables = {"parent": forest.parent, "ends": forest.ends}  # the shape of the tree, and all that is trained on it
        if forest.tree_streams:
            tables |= {"token_ids": forest.token_ids, **forest.tree_streams}
        for name, values in sorted(tables.items()):
            digest.update(f"{name}:{values.dtype}{values.shape}".encode())
            digest.update(np.ascontiguousarray(values).data)
        update_with_content(digest, () if forest.tree_streams else forest.trajectories)
    fingerprint = known if isinstance(known, str) else digest.hexdigest()
    trajectories, tree_tokens, flat_tokens, leaf_tokens, images = map(int, counts)
    return DataFacts(
        fingerprint, len(dataset), trajectories, tree_tokens, flat_tokens, leaf_tokens, num_longest, source, images
    )


# -- loaders of a run -------------------------------------------------------------------------------------------------


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


def make_placer(args: TreeTrainingArguments, model: torch.nn.Module, objective: Objective) -> OnlinePlacer | None:
    """Places trees on the ranks of a run by predicted time; None where ranks take them in turn."""
    if not args.places_trees:
        return None
    return OnlinePlacer(
        costs_of_flops(flop_model(model)),
        args.max_tokens if isinstance(args.max_tokens, int) else None,
        getattr(objective, "weighting", "per_trajectory"),
        in_lockstep=args.shard_settings() is not None or args.ep_size > args.tp_size,
        ranks_per_batch=args.ranks_per_batch,
    )
