"""Sizes and identity of a data set, from one pass over its trees."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treewise.base.progress import busy_with, tell_progress
from treewise.tree.forest import forest_of
from treewise.tree.trajectory import update_with_content


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Sizes and identity of a data set. `fingerprint` changes whenever the trained content or its order does.

    num_longest_tokens, longest_source: length of the longest trajectory, and its source. num_images: image
    spans of all trees. dates: that chat templates wrote in it as today's.
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
    dates: tuple[str, ...] = ()


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
    dates = tuple(getattr(getattr(dataset, "report", None), "dates", ()))
    sizes = len(dataset), trajectories, tree_tokens, flat_tokens, leaf_tokens
    return DataFacts(fingerprint, *sizes, num_longest, source, images, dates)
