"""Mixtures of data sets, and a part of one for evaluation."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treewise.base.lazy_sequence import LazySequence
from treewise.data.dataset import TrainingTree, TreeDataset
from treewise.data.io.field_checks import shown
from treewise.data.io.options import LoadReport
from treewise.data.raw import OF_AXOLOTL, is_part
from treewise.errors import ConfigError, DataError, num

MAX_MIXED = 100_000_000  # trees of a part of a mixture


class SelectedTrees(LazySequence[TrainingTree]):
    """Trees out of one or several data sets, in an order of its own; a tree may appear several times.

    Each is a sample of its own: copies of a tree, and trees of two data sets, have no group or rollout in common.

    Has what a `TreeDataset` has. report: of all data sets together, with `num_trees` counting the selected trees.
    """

    def __init__(self, parts: Sequence[TreeDataset], index: np.ndarray) -> None:
        """index: [trees, 2] int64, the data set and the tree in it."""
        self._parts, self._index = tuple(parts), index
        self._copy = np.zeros(len(index), dtype=np.int64)  # how often a tree was there before
        _, times = np.unique(index, axis=0, return_counts=True)
        in_order = np.lexsort((index[:, 1], index[:, 0]))  # as `unique` has them, equal ones as they come
        self._copy[in_order] = np.arange(len(index)) - np.repeat(np.cumsum(times) - times, times)
        self._first_part: dict[str, int] = {}  # that has a tree of a name
        for number, part in enumerate(parts if len(parts) > 1 else ()):
            for name in part.names:
                self._first_part.setdefault(name, number)
        self.report = LoadReport.joined([part.report for part in parts], len(index))
        facts = json.dumps([part.fingerprint for part in parts]).encode()
        self.fingerprint = hashlib.sha256(facts + np.ascontiguousarray(index).tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._index)

    def item(self, index: int) -> TrainingTree:
        """The tree at an index from 0 to the length."""
        part, tree = self._index[index].tolist()
        found, copy = self._parts[part][tree], int(self._copy[index])
        is_first = self._first_part.get(found.name, part) == part
        return found if is_first and not copy else found.marked(copy if is_first else (part, copy))

    @property
    def names(self) -> Sequence[str]:
        """The name of each tree."""
        return [self._parts[part].names[tree] for part, tree in self._index.tolist()]

    def check_vocabulary(self, vocab_size: int) -> None:
        """See `TreeDataset.check_vocabulary`; all trees of the data sets are checked."""
        for part in self._parts:
            part.check_vocabulary(vocab_size)

    def chosen(self, is_chosen: np.ndarray) -> "SelectedTrees":
        """The trees where `is_chosen` ([trees] bool) is true."""
        return SelectedTrees(self._parts, self._index[is_chosen])

    def __repr__(self) -> str:
        return f"SelectedTrees({num(len(self), 'tree')} out of {num(len(self._parts), 'data set')})"


Trees = TreeDataset | SelectedTrees


def parts_of(data: Any) -> list[tuple[Any, float]]:
    """The parts of a mixture (`{"data": ..., "weight": ...}`, one or a list) and their weights.

    Raises:
        DataError: a part without data, or with axolotl's keys for what is found here without them.
    """
    parts = []
    for index, item in enumerate(data if isinstance(data, list | tuple) else [data]):
        if not is_part(item):
            parts.append((item, 1.0))
            continue
        name = "data" if "data" in item else "path"
        if unread := sorted(OF_AXOLOTL & set(item)):
            raise DataError(
                f"data[{index}] has {', '.join(map(repr, unread))}, which nothing reads; leave it out: the form of a "
                "record is found by its keys, and a split is a part of the name, as hf:org/name[train]."
            )
        if set(item) not in ({name, "weight"}, {name}):
            raise DataError(f"data[{index}] of a mixture is {shown(item)}; give {{data: ..., weight: ...}}.")
        parts.append((item[name], item.get("weight", 1.0)))
    return parts


def mix(datasets: Sequence[TreeDataset], weights: Sequence[float] | None = None, seed: int = 0) -> SelectedTrees:
    """One data set of several. `weights[i]`: how often each tree of the i-th is in it, 1 by default.

    A weight of 2 holds each tree twice; 0.5 holds half of the trees, drawn once by `seed`; 1.25 all, and a quarter of
    them twice. An epoch is a pass over the mixture.

    Raises:
        ConfigError: a weight that is not positive or not finite, another number of weights, or nothing left.
    """
    weights = [1.0] * len(datasets) if weights is None else list(weights)
    if len(weights) != len(datasets):
        raise ConfigError(f"{len(weights)} weights for {len(datasets)} data sets.")
    index = []
    for number, (dataset, weight) in enumerate(zip(datasets, weights, strict=True)):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ConfigError(
                f"weight {weight!r} of data set {number} must be a positive number; 0 would leave it out."
            )
        if weight * len(dataset) > MAX_MIXED:
            raise ConfigError(f"weight {weight!r} of data set {number} makes {weight * len(dataset):.0f} trees of it.")
        times, rest = divmod(weight, 1)
        order = np.random.default_rng([seed, number]).permutation(len(dataset))
        extra = np.sort(order[: round(rest * len(dataset))])
        trees = np.concatenate([np.tile(np.arange(len(dataset)), int(times)), extra])
        index.append(np.stack([np.full(len(trees), number), trees], axis=1))
    if not sum(map(len, index)):
        raise ConfigError("the mixture holds no tree; raise its weights.")
    return SelectedTrees(datasets, np.concatenate(index).astype(np.int64))


def split_for_evaluation(dataset: Trees, fraction: float, seed: int = 0) -> tuple[SelectedTrees, SelectedTrees]:
    """A data set for training, and one for evaluation that holds `fraction` of its trees, at least one.

    Trees are chosen by a hash of their names (groups), so that no group is on both sides, nor a tree that a mixture
    holds several times; adding trees moves few others.

    Raises:
        ConfigError: a fraction outside of 0 and 1, or a single tree.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise ConfigError(f"eval_split is {fraction!r}; give a fraction between 0 and 1, such as 0.05.")
    names = list(dataset.names)
    distinct = sorted(set(names), key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    if len(distinct) < 2:
        raise ConfigError("eval_split needs at least two trees (groups): one to train and one to evaluate.")
    count = min(max(1, round(fraction * len(distinct))), len(distinct) - 1)
    held_out = set(distinct[:count])
    is_held_out = np.array([name in held_out for name in names])
    whole = dataset if isinstance(dataset, SelectedTrees) else mix([dataset])
    train, evaluation = whole.chosen(~is_held_out), whole.chosen(is_held_out)
    evaluation.report = replace(evaluation.report, warnings=[], dropped=[])  # told with the training data
    return train, evaluation
