"""Facts about data: sizes of trees, their ratios, and findings. Plain numbers, with a JSON twin."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treewise.data import LoadReport
from treewise.nn.flops import FlopModel
from treewise.report.analysis.findings import MEANINGS, Duplicates, long_trajectories, sources_of, suspicions
from treewise.report.analysis.token_text import TokenText
from treewise.tree.forest import Forest

NUM_BEST_TREES = 5
NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """Sizes of one training tree, or sums over several. FLOPs are None without a model.

    Tokens of images are those of their spans; num_images: distinct ones.
    """

    name: str
    num_trajectories: int
    num_leaves: int
    num_flat_tokens: int
    num_leaf_tokens: int
    num_tree_tokens: int
    num_trained_tokens: int
    num_flat_pairs: int
    num_tree_pairs: int
    max_depth: int
    num_forks: int
    num_row_tokens: int
    flat_flops: float | None = None
    leaf_flops: float | None = None
    tree_flops: float | None = None
    num_images: int = 0
    num_image_tokens: int = 0
    num_flat_image_tokens: int = 0

    @property
    def share_ratio(self) -> float:
        return self.num_flat_tokens / self.num_tree_tokens

    @property
    def row_ratio(self) -> float:
        """One row per conversation / tree tokens."""
        return self.num_row_tokens / self.num_tree_tokens

    @property
    def leaf_ratio(self) -> float:
        return self.num_leaf_tokens / self.num_tree_tokens

    @property
    def pair_ratio(self) -> float:
        return self.num_flat_pairs / self.num_tree_pairs

    @property
    def flop_bound(self) -> float | None:
        return _quotient(self.flat_flops, self.tree_flops)

    @property
    def leaf_flop_bound(self) -> float | None:
        return _quotient(self.leaf_flops, self.tree_flops)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, ratios included."""
        ratios = ("share_ratio", "leaf_ratio", "row_ratio", "pair_ratio", "flop_bound", "leaf_flop_bound")
        return asdict(self) | {name: getattr(self, name) for name in ratios}


@dataclass(frozen=True, slots=True)
class Finding:
    """A likely mistake or waste in the data: how often, and the first examples."""

    kind: str
    count: int
    meaning: str
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InspectReport:
    """Facts about loaded data. total: sums over the trees, each merged on its own. trees: in file order."""

    model: str | None
    num_files: int
    num_records: int
    total: TreeFacts
    trees: tuple[TreeFacts, ...]
    findings: tuple[Finding, ...]

    @property
    def best_trees(self) -> list[TreeFacts]:
        """The trees of the highest leaf ratio."""
        return sorted(self.trees, key=lambda tree: -tree.leaf_ratio)[:NUM_BEST_TREES]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable names."""
        return {
            "model": self.model,
            "num_files": self.num_files,
            "num_records": self.num_records,
            "num_trees": len(self.trees),
            "total": self.total.to_dict(),
            "best_trees": [tree.name for tree in self.best_trees],
            "trees": [tree.to_dict() for tree in self.trees],
            "findings": [asdict(finding) | {"examples": list(finding.examples)} for finding in self.findings],
        }


def inspect_forests(
    forests: Iterable[tuple[str, Forest]],
    load: LoadReport,
    flops: FlopModel | None = None,
    model: str | None = None,
    max_tokens: int | None = None,
    text: TokenText | None = None,
) -> InspectReport:
    """Facts about named trees; one forest is in memory at a time. With `text`, special tokens inside text are found."""
    facts: list[TreeFacts] = []
    examples: dict[str, list[str]] = defaultdict(list)
    lengths, sources, duplicates = [], [], Duplicates()
    for name, forest in forests:
        facts.append(tree_facts(name, forest, flops))
        lengths.append(forest.path_lengths)
        sources.append(sources_of(name, forest))
        examples["duplicate in another tree"] += duplicates.add(name, forest, sources[-1])
        for kind, found in suspicions(name, forest, max_tokens, text).items():
            examples[kind] += found
    examples["extremely long trajectory"] = long_trajectories(lengths, sources)
    examples["retokenised or unusual"] = list(load.warnings)
    examples["unused key"] = load.unused_key_lines()
    examples["dropped record"] = [f"{location}: {reason}" for location, reason in load.dropped]
    findings = tuple(
        Finding(kind, len(examples[kind]), meaning, tuple(examples[kind][:NUM_EXAMPLES]))
        for kind, meaning in MEANINGS.items()
        if examples[kind]
    )
    return InspectReport(model, load.num_files, load.num_records, sum_facts("all", facts), tuple(facts), findings)


def tree_facts(name: str, forest: Forest, flops: FlopModel | None = None) -> TreeFacts:
    """Sizes of one tree, and its FLOPs for a model."""
    above = forest.segments.parent
    return TreeFacts(
        name=name,
        num_trajectories=forest.num_trajectories,
        num_leaves=len(forest.leaf_trajectories),
        num_flat_tokens=forest.num_flat_tokens,
        num_leaf_tokens=forest.num_leaf_tokens,
        num_tree_tokens=forest.num_tokens,
        num_trained_tokens=int(np.count_nonzero(forest.token_weights())),
        num_flat_pairs=forest.num_flat_pairs,
        num_tree_pairs=forest.num_tree_pairs,
        max_depth=int(forest.path_lengths.max()),
        num_forks=int((np.bincount(above[above >= 0]) > 1).sum()),
        num_row_tokens=row_tokens(forest),
        flat_flops=flops.flat(forest) if flops else None,
        leaf_flops=flops.leaf(forest) if flops else None,
        tree_flops=flops.tree(forest) if flops else None,
        num_images=len(forest.images.sources),
        num_image_tokens=int((forest.images.end - forest.images.start).sum()),
        num_flat_image_tokens=_flat_image_tokens(forest),
    )


def _flat_image_tokens(forest: Forest) -> int:
    if not len(forest.images):
        return 0
    return sum(image.end - image.start for item in forest.trajectories for image in item.images)


def row_tokens(forest: Forest) -> int:
    """Tokens of one row per conversation, as a trainer without trees takes them: the longest trajectory of each record.
    A rollout or logged call has all of its trajectories that are not contained in another: each is trained.
    """
    rows: dict[Any, int] = {}
    has_more = (
        np.bincount(forest.segments.parent[forest.segments.parent >= 0], minlength=len(forest.segments.parent)) > 0
    )
    ends = forest.segments.end_segment.tolist()
    for index, (item, length) in enumerate(zip(forest.trajectories or (), forest.path_lengths.tolist(), strict=False)):
        if item.rollout is None:
            record = str(item.source or index).split("#")[0]
            rows[record] = max(rows.get(record, 0), length)
        elif not has_more[ends[index]]:
            rows[item.group, item.rollout, ends[index]] = length
    return sum(rows.values())


def sum_facts(name: str, facts: Sequence[TreeFacts]) -> TreeFacts:
    """The sum over trees; the depth is the largest."""
    values = [asdict(tree) for tree in facts]
    sums: dict[str, Any] = {"name": name, "max_depth": max(tree.max_depth for tree in facts)}
    for key in values[0]:
        if key not in sums:
            column = [value[key] for value in values]
            sums[key] = None if None in column else sum(column)
    return TreeFacts(**sums)


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below
