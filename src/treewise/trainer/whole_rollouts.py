"""A data set whose items hold whole rollouts, for losses that count rollouts.

Steps, batches and ranks take items, so rows of one rollout in several items would be several rollouts to some steps.
Items that have rows of one rollout in common are one item here; so are those of a group that a loss compares.
"""

import hashlib
import json
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from treewise.base.lazy_sequence import LazySequence
from treewise.base.progress import busy_with
from treewise.errors import num
from treewise.objectives.protocol import may_merge_trees
from treewise.objectives.rollouts import needs_whole_rollouts
from treewise.trainer.batches import trajectories_of_item
from treewise.tree.forest import Forest, forest_of

logger = logging.getLogger("treewise")


class WholeRollouts(LazySequence[Any]):
    """The items of another data set, of which some are joined: into one tree, or side by side where trees count apart.

    members: indices of the joined items, of each item.
    """

    def __init__(self, dataset: Sequence[Any], members: Sequence[Sequence[int]], *, merges: bool) -> None:
        self._dataset, self._members, self._merges = dataset, members, merges
        known = getattr(dataset, "fingerprint", None)
        self.fingerprint = (
            hashlib.sha256(json.dumps([known, members]).encode()).hexdigest() if isinstance(known, str) else None
        )

    def __len__(self) -> int:
        return len(self._members)

    def item(self, index: int) -> Any:
        """The item at an index from 0 to the length."""
        parts = [self._dataset[member] for member in self._members[index]]
        if len(parts) == 1:
            return parts[0]
        rows = [trajectories_of_item(part) for part in parts]
        if self._merges and all(own is not None for own in rows):
            return [row for own in rows for row in own or ()]
        return Forest.concatenate([forest_of(part) for part in parts])


def with_whole_rollouts(dataset: Any, objective: object) -> Any:
    """The data set as a loss that counts rollouts needs it; the same one where no rollout has rows in several items.

    Rollouts whose rows all carry `rollout_weight` stay apart where the loss can do with parts of them. dataset: may be
    None, or a mapping of names to data sets.
    """
    if isinstance(dataset, Mapping):
        return {name: with_whole_rollouts(each, objective) for name, each in dataset.items()}
    if dataset is None or isinstance(dataset, WholeRollouts) or len(dataset) < 2:
        return dataset
    members = _joined_items(dataset, objective)
    if len(members) == len(dataset):
        return dataset
    logger.info(
        "rows of one rollout are in several items of the data: %s are trained as %s",
        num(len(dataset), "item"),
        num(len(members), "item"),
    )
    return WholeRollouts(dataset, members, merges=may_merge_trees(objective))


@busy_with("finding the rows of each rollout")
def _joined_items(dataset: Sequence[Any], objective: object) -> list[list[int]]:
    """Indices of items, those that stand as one together, by the first of them."""
    places: dict[Hashable, list[int]] = {}
    for index in range(len(dataset)):
        for key in _keys(dataset[index], objective):
            found = places.setdefault(key, [])
            if not found or found[-1] != index:
                found.append(index)
    root = list(range(len(dataset)))

    def root_of(index: int) -> int:
        while root[index] != index:
            root[index] = index = root[root[index]]
        return index

    for found in places.values():
        for index in found[1:]:
            one, other = sorted((root_of(found[0]), root_of(index)))
            root[other] = one
    members: dict[int, list[int]] = {}
    for index in range(len(dataset)):
        members.setdefault(root_of(index), []).append(index)
    return list(members.values())


def _keys(item: Any, objective: object) -> Iterator[Hashable]:
    """What an item may have in common with another, so that both stand as one."""
    by_group, needs_whole = getattr(objective, "needs_whole_groups", False), needs_whole_rollouts(objective)
    rows = trajectories_of_item(item)
    if rows is None:  # a declared tree; one too large to hold flat has no labels
        tree = forest_of(item)
        rows = tree.trajectories if tree.is_flat else ()
    for row in rows:
        if by_group and row.group is not None:
            yield "group", row.group
        elif row.rollout is not None and (needs_whole or row.rollout_weight is None):
            yield row.group, row.rollout
