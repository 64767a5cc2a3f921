"""Results of records, in order, to the table of training trees; bad records go into the quarantine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa

from treewise.data.declared_nodes import PlacedNode
from treewise.data.io.options import LoadReport
from treewise.data.io.printable import printable
from treewise.data.io.row_store import RowStore
from treewise.data.io.rows import RecordResult, Row
from treewise.data.io.table import content_hash
from treewise.data.records import RecordReader
from treewise.data.render.tools import find_tools
from treewise.errors import ConfigError, DataError, num

_MAX_WARNINGS = 1000


@dataclass(slots=True)
class _Tree:
    name: str
    index: int
    num_records: int = 0
    num_rows: int = 0


class TreeBuilder:
    """Collects results in order into trees, and bad records into the quarantine. A context: its files are open inside.

    Parameters:
        on_bad_record: `error`, or `quarantine`: bad records are written to the file `quarantine`.
        allow_partial_tail: a last line that was cut off is left out.
        store: takes the rows.
    """

    def __init__(
        self, reader: RecordReader, on_bad_record: str, allow_partial_tail: bool, quarantine: Path, store: RowStore
    ) -> None:
        self.reader = reader
        self.store = store
        self.num_trajectories = 0
        self.quarantines = on_bad_record == "quarantine"
        self.allow_partial_tail = allow_partial_tail
        self.quarantine_path = quarantine
        self.stream: TextIO | None = None
        self.trees: list[_Tree] = []
        self.by_key: dict[str, _Tree] = {}
        self.by_rollout: dict[str, tuple[str, Any]] = {}
        self.node_trees: dict[tuple[str, str], tuple[_Tree, list[PlacedNode]]] = {}
        self.report = LoadReport()
        self.warnings: dict[str, None] = {}

    def __enter__(self) -> "TreeBuilder":
        if self.quarantines:
            try:
                self.stream = self.quarantine_path.open("w", encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"quarantine_path {self.quarantine_path} cannot be written ({error.strerror})."
                ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
        if self.stream is not None:
            self.stream.close()

    def add(self, result: RecordResult) -> None:
        """Takes the next result in order."""
        self.report.num_records += 1
        self.warnings.update(dict.fromkeys([*result.warnings, *result.drift]))
        for key in result.unused_keys:
            self.report.unused_keys[key] = self.report.unused_keys.get(key, 0) + 1
        self.report.num_compared += result.is_compared
        self.report.num_preferences += result.is_preference
        self.report.num_drifted += bool(result.drift)
        self._keep_rollout_together(result)
        if result.error is not None:
            self._drop(result)
        elif result.node is not None:
            self._add_node(result)
        else:
            tree = self.by_key.get(result.key) if result.key is not None else None
            if tree is None:
                tree = self._new_tree(result.name)
                if result.key is not None:
                    self.by_key[result.key] = tree
            self._add_rows(tree, result.rows)
            tree.num_records += 1

    def _new_tree(self, name: str) -> _Tree:
        tree = _Tree(name, len(self.trees))
        self.trees.append(tree)
        return tree

    def _add_rows(self, tree: _Tree, rows: list[Row]) -> None:
        tree.num_rows += len(rows)
        self.num_trajectories += sum(row.parent is None or bool(row.is_end) for row in rows)
        self.store.add(tree.index, rows)

    def _keep_rollout_together(self, result: RecordResult) -> None:
        """Rows of one rollout that name no group have different prompts: that of the first is the rollout's."""
        if not result.is_grouped_by_prompt or result.rollout is None:
            return
        name = json.dumps(result.rollout)
        first = (result.key or json.dumps(["rollout", result.rollout]), result.rows[0].group)
        result.key, group = self.by_rollout.setdefault(name, first)
        for row in result.rows:
            row.group = group

    def finish_node_trees(self) -> None:
        """Builds the trees that were given one node per line."""
        for (file, name), (tree, placed) in self.node_trees.items():
            try:
                tools = find_tools(placed[0].value, Path(file), placed[0].location)
                _, rows = self.reader.declared_rows(placed, tools, Path(file))
            except DataError as error:
                text = json.dumps([node.value for node in placed], default=str)
                self._drop(RecordResult(f"{file}: tree {name}", error=str(error), raw=text))
            else:
                self._add_rows(tree, rows)
                tree.num_records = len(placed)

    def result(self, num_sources: int) -> tuple[pa.Table, dict[str, Any], LoadReport]:
        """The table, what belongs to it, and the report."""
        report = self.report
        trees = [tree for tree in self.trees if tree.num_rows]
        if not trees:
            reason = (
                f" ({len(report.dropped)} were left out; the first: {report.dropped[0][1]})" if report.dropped else ""
            )
            raise DataError(f"no record to train on in {num(num_sources, 'file')}{reason}.")
        index_of_tree = np.full(len(self.trees), -1)
        index_of_tree[[tree.index for tree in trees]] = np.arange(len(trees))
        table = self.store.finish(index_of_tree)
        names = [tree.name for tree in trees]
        facts = {
            "names": names,
            "num_records": [tree.num_records for tree in trees],
            "fingerprint": content_hash(table, names),
        }
        report.num_files, report.num_trees = num_sources, len(trees)
        report.num_trajectories = self.num_trajectories
        report.warnings += list(self.warnings)[:_MAX_WARNINGS]
        if len(self.warnings) > _MAX_WARNINGS:
            report.warnings.append(f"{len(self.warnings) - _MAX_WARNINGS} more warnings")
        return table, facts, report

    def _add_node(self, result: RecordResult) -> None:
        assert result.node is not None
        file, _, _ = result.location.rpartition(":")
        name, node = result.node
        if (file, name) not in self.node_trees:
            tree = self._new_tree(printable(json.loads(name)))
            self.node_trees[file, name] = (tree, [])
        self.node_trees[file, name][1].append(PlacedNode(result.location, node))

    def _drop(self, result: RecordResult) -> None:
        assert result.error is not None
        partial = result.is_partial_tail and self.allow_partial_tail
        if not partial and not self.quarantines:
            raise DataError(result.error)
        self.report.dropped.append((result.location, result.error))
        if self.stream is not None:
            line = {"location": result.location, "reason": result.error, "record": result.raw}
            self.stream.write(json.dumps(line) + "\n")
