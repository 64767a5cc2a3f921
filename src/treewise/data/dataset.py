"""Training trees: what a load gives back, one tree at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from treewise.data.io.options import LoadReport
from treewise.data.io.rows import Row, trajectories_from_rows
from treewise.data.io.table import first_id_outside, table_rows
from treewise.errors import DataError, num
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class DeclaredNodes:
    """The nodes of a declared tree, parents first.

    Parameters:
        parents: index of each node's parent, -1 for a root.
        token_ids: the tokens that each node adds.
        streams: per-token streams by name (`loss_weights` always), one value per token of each node.
        ends: nodes at which a trajectory ends (leaves always).
        rewards: one for each node, of the trajectory that ends there; None elsewhere.
        rollouts: the same.
        group: of all trajectories; the tree's name where None.
        merge_siblings: merge siblings with equal tokens, or keep them apart.
        images: of each node, with spans that count from its first token.
    """

    parents: list[int]
    token_ids: list[np.ndarray]
    streams: dict[str, list[np.ndarray]]
    ends: list[bool]
    rewards: list[float | None]
    rollouts: list[Any]
    group: Any
    merge_siblings: bool
    images: list[tuple[ImageSpan, ...]]


@dataclass(frozen=True, slots=True)
class TrainingTree:
    """Records that are trained as one tree: trajectories to be merged, or nodes of a declared tree."""

    name: str
    trajectories: list[Trajectory] | None
    nodes: DeclaredNodes | None
    num_records: int
    source: str

    def forest(self) -> Forest:
        """The tree of its trajectories, shared prefixes merged; or the declared tree as it was given."""
        if self.trajectories is not None:
            return Forest.from_trajectories(self.trajectories)
        nodes: Any = self.nodes  # lists of arrays stand for lists of lists
        return Forest.from_nodes(
            nodes.parents,
            nodes.token_ids,
            **nodes.streams,
            ends=nodes.ends,
            merge_siblings=nodes.merge_siblings,
            group=self.name if nodes.group is None else nodes.group,
            source=self.source,
            images=nodes.images,
        )

    def flat_trajectories(self) -> list[Trajectory]:
        """All trajectories; those of a declared tree are its paths.

        Raises:
            DataError: a declared tree that is too large to hold its paths flat.
        """
        if self.trajectories is not None:
            return self.trajectories
        forest = self.forest()
        if forest.tree_streams:
            raise DataError(
                f"{self.source}: the paths of this declared tree have {forest.num_flat_tokens:,} tokens, too many to "
                "list them; leave it out, or split it into several trees."
            )
        return list(forest.trajectories)

    def labelled_trajectories(self) -> list[Trajectory]:
        """`flat_trajectories` with their rewards and rollouts. Raises the same error."""
        if self.trajectories is not None:
            return self.trajectories
        assert self.nodes is not None
        ends = [number for number, is_end in enumerate(self.nodes.ends) if is_end]
        return [
            replace(item, reward=self.nodes.rewards[end], rollout=self.nodes.rollouts[end])
            for item, end in zip(self.flat_trajectories(), ends, strict=True)
        ]


class TreeDataset:
    """A sequence of `TrainingTree` in one Arrow table; trajectories are built when a tree is read.

    `report` counts what was read and left out; `fingerprint` changes exactly when trained content or order does.
    """

    def __init__(self, table: pa.Table, facts: dict[str, Any], report: LoadReport, merge_siblings: bool) -> None:
        self._table = table
        self._names: list[str] = facts["names"]
        self._num_records: list[int] = facts["num_records"]
        trees = table.column("tree").to_numpy()
        # Rows in a mapped file are in the order in which they were read, so a tree may be in several places.
        self._order = None if (trees[1:] >= trees[:-1]).all() else np.argsort(trees, kind="stable")
        in_order = trees if self._order is None else trees[self._order]
        self._bounds = np.searchsorted(in_order, np.arange(len(self._names) + 1))
        self._merge_siblings = merge_siblings
        self.report = report
        self.fingerprint: str = facts["fingerprint"]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> TrainingTree:
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"tree {index} of {len(self)}")
        rows = self._rows(int(self._bounds[index]), int(self._bounds[index + 1]))
        declared = rows[0].parent is not None
        return TrainingTree(
            name=self._names[index],
            trajectories=None if declared else trajectories_from_rows(rows),
            nodes=_declared_nodes(rows, self._merge_siblings) if declared else None,
            num_records=self._num_records[index],
            source=rows[0].source,
        )

    def _rows(self, low: int, high: int) -> list[Row]:
        if self._order is None:
            return table_rows(self._table, low, high)
        index = self._order[low:high]
        starts = np.flatnonzero(np.diff(index, prepend=-2) != 1)
        runs = zip(starts, [*starts[1:], len(index)], strict=True)
        parts = [table_rows(self._table, int(index[a]), int(index[b - 1]) + 1) for a, b in runs]
        return [row for part in parts for row in part]

    def __iter__(self) -> Iterator[TrainingTree]:
        return (self[index] for index in range(len(self)))

    @property
    def names(self) -> Sequence[str]:
        """The name of each tree."""
        return self._names

    def __repr__(self) -> str:
        return f"TreeDataset({num(len(self), 'tree')}, {num(self.report.num_records, 'record')})"

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks that a model of `vocab_size` tokens can read all of the data.

        Raises:
            DataError: the first token id that is too large, with its record and position.
        """
        outside = first_id_outside(self._table, vocab_size)
        if outside is not None:
            row, position, token = outside
            location = self._table.column("source")[row].as_py()
            raise DataError(
                f"{location}: token id {token} at position {position} is outside the vocabulary of {vocab_size} "
                "tokens; the data was made with another tokenizer, or the model needs more embeddings."
            )


def _declared_nodes(rows: list[Row], merge_siblings: bool) -> DeclaredNodes:
    return DeclaredNodes(
        parents=[-1 if row.parent is None else row.parent for row in rows],
        token_ids=[row.token_ids for row in rows],
        streams={name: [row.streams[name] for row in rows] for name in rows[0].streams},
        ends=[bool(row.is_end) for row in rows],
        rewards=[row.reward for row in rows],
        rollouts=[row.rollout for row in rows],
        group=rows[0].group,
        merge_siblings=merge_siblings,
        images=[row.images for row in rows],
    )
