"""Training trees: what a load gives back, one tree at a time."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from treewise.base import features
from treewise.base.lazy_sequence import LazySequence
from treewise.data.io.options import LoadReport
from treewise.data.io.rows import first_id_outside, table_columns, trajectories_of
from treewise.errors import DataError, num
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TrainingTree:
    """Records that are trained as one tree: trajectories to be merged, or nodes of a declared tree.

    nodes: columns of `table_columns`, a row for each node, parents first. merge_siblings: of nodes with equal tokens.
    routing_replay: see `RenderOptions`.
    """

    name: str
    trajectories: list[Trajectory] | None
    nodes: dict[str, list[Any]] | None
    num_records: int
    source: str
    merge_siblings: bool = True
    routing_replay: str = "exact"

    def forest(self) -> Forest:
        """The tree of its trajectories, shared prefixes merged; or the declared tree as it was given, whose paths have
        the rewards and rollouts of their last nodes, unless it is too large to hold them flat.
        """
        if self.nodes is None:
            return Forest.from_trajectories(self.trajectories or ())
        nodes = self.nodes
        names = dict.fromkeys(name for streams in nodes["streams"] for name in streams)
        if self.routing_replay != "exact":
            names.pop("routed_experts", None)
        forest = Forest.from_nodes(
            nodes["parent"],
            nodes["token_ids"],
            **{name: [streams.get(name) for streams in nodes["streams"]] for name in names},
            ends=list(map(bool, nodes["is_end"])),
            merge_siblings=self.merge_siblings,
            group=self.name if nodes["group"][0] is None else nodes["group"][0],
            source=self.source,
            images=nodes["images"],
        )
        if forest.is_flat:
            labels = zip(nodes["is_end"], nodes["reward"], nodes["rollout"], strict=True)
            ends = [(reward, rollout) for is_end, reward, rollout in labels if is_end]
            forest.trajectories = tuple(
                replace(item, reward=reward, rollout=rollout)
                for item, (reward, rollout) in zip(forest.trajectories, ends, strict=True)
            )
        return forest

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

    def marked(self, mark: Hashable) -> "TrainingTree":
        """The same tree as another sample: its groups and rollouts are none of those that other marks have."""
        if self.nodes is not None:
            own = [self.name if group is None else group for group in self.nodes["group"]]
            return replace(self, nodes={**self.nodes, "group": [(group, mark) for group in own]})
        marked = [
            replace(item, rollout=None if item.rollout is None else (item.rollout, mark))
            if item.group is None
            else replace(item, group=(item.group, mark))
            for item in self.trajectories or ()
        ]
        return replace(self, trajectories=marked)

    def labelled_trajectories(self) -> list[Trajectory]:
        """All trajectories, with their rewards and rollouts. Raises the error of `flat_trajectories`."""
        return self.flat_trajectories()


class TreeDataset(LazySequence[TrainingTree]):
    """A sequence of `TrainingTree` in one Arrow table; trajectories are built when a tree is read.

    `report` counts what was read and left out; `fingerprint` changes exactly when trained content or order does.
    """

    def __init__(
        self,
        table: pa.Table,
        facts: dict[str, Any],
        report: LoadReport,
        merge_siblings: bool,
        routing_replay: str = "exact",
    ) -> None:
        self._table = table
        self.names: Sequence[str] = facts["names"]
        self._num_records: list[int] = facts["num_records"]
        trees = table.column("tree").to_numpy()
        # Rows in a mapped file are in the order in which they were read, so a tree may be in several places.
        self._order = None if (trees[1:] >= trees[:-1]).all() else np.argsort(trees, kind="stable")
        in_order = trees if self._order is None else trees[self._order]
        self._bounds = np.searchsorted(in_order, np.arange(len(self.names) + 1))
        self._merge_siblings, self._routing_replay = merge_siblings, routing_replay
        self.report = report
        self.fingerprint: str = facts["fingerprint"]

    def __len__(self) -> int:
        return len(self.names)

    def item(self, index: int) -> TrainingTree:
        """The tree at an index from 0 to the length."""
        low, high = self._bounds[index : index + 2].tolist()
        part = self._table.slice(low, high - low) if self._order is None else self._table.take(self._order[low:high])
        rows = table_columns(part)
        is_declared = rows["parent"][0] is not None
        trajectories = None if is_declared else trajectories_of(rows)
        if trajectories is not None and self._routing_replay == "off":
            trajectories = [replace(trajectory, routed_experts=None) for trajectory in trajectories]
        if trajectories is not None and self._routing_replay == "by_tokens":
            trajectories = features.routes.by_tokens(trajectories)
        return TrainingTree(
            name=self.names[index],
            trajectories=trajectories,
            nodes=rows if is_declared else None,
            num_records=self._num_records[index],
            source=rows["source"][0],
            merge_siblings=self._merge_siblings,
            routing_replay=self._routing_replay,
        )

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
