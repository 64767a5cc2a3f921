"""Facts about data: sizes of trees, their ratios, and findings. Plain numbers, with a JSON twin."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treewise.data import LoadReport
from treewise.nn.flops import FlopModel
from treewise.report.analysis.calls import calls_of
from treewise.report.analysis.token_text import TokenText
from treewise.tree.forest import Forest

NUM_BEST_TREES = 5
NUM_EXAMPLES = 3
VERY_SHORT = 16  # tokens
LITTLE_SHARING = 1.05  # share ratio
FEW_TRAINED = 0.005  # of the tokens of a trajectory
LONG_FACTOR = 8  # times the median length
MAX_SEARCHED_TOKENS = 4_000_000  # per tree, for special tokens

EQUAL_REWARDS = "rewards all equal"
MEANINGS = {
    "dropped record": "left out of training",
    "retokenised or unusual": "read with a warning",
    "unused key": "nothing reads it, and nothing of it is trained",
    EQUAL_REWARDS: "group-relative advantages are zero, so reinforcement learning learns nothing from it",
    "special token in text": "a control token spelled out as ordinary text; the model would learn to write it",
    "turn ends inside an answer": "a token that begins or ends a turn is trained, and the answer goes on behind it",
    "duplicated trajectory": "the same tokens as an earlier one; counts again in the loss, costs nothing",
    "duplicate in another tree": "the same tokens in two trees; a leak, if one of them is held out",
    "extremely long trajectory": f"more than {LONG_FACTOR} times the median length, and twice what 95 % stay below",
    "hardly any trained token": f"fewer than {FEW_TRAINED:.1%} of its tokens; nearly all of its cost is context",
    "very short trajectory": f"fewer than {VERY_SHORT} tokens",
    "no sharing": f"several trajectories, share ratio below {LITTLE_SHARING}; check that they share their prompt",
    "single trajectory": "a tree of one, which trains as fast as flat",
    "beyond max_tokens": "cut to fit; the tokens above a cut are computed forward twice",
}


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """Sizes of one training tree, or sums over several. FLOPs are None without a model.

    Tokens of images are those of their spans; num_images: distinct ones. num_calls, num_call_tokens, call_flops: of one
    row per call (`calls_of`), which the flat ones are where no trajectory holds several. num_rollouts: a trajectory
    whose record names none is its own.
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
    flat_flops: float | None = None
    leaf_flops: float | None = None
    tree_flops: float | None = None
    num_images: int = 0
    num_image_tokens: int = 0
    num_flat_image_tokens: int = 0
    num_calls: int = 0
    num_call_tokens: int = 0
    call_flops: float | None = None
    num_rollouts: int = 0

    @property
    def holds_merged_turns(self) -> bool:
        """Whether trajectories hold several calls, so that they are not one row per call."""
        return self.num_calls > self.num_trajectories

    @property
    def call_ratio(self) -> float:
        return self.num_call_tokens / self.num_tree_tokens

    @property
    def call_flop_bound(self) -> float | None:
        return _quotient(self.call_flops, self.tree_flops)

    @property
    def share_ratio(self) -> float:
        return self.num_flat_tokens / self.num_tree_tokens

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
        ratios = (
            *("share_ratio", "leaf_ratio", "call_ratio", "pair_ratio"),
            *("flop_bound", "leaf_flop_bound", "call_flop_bound"),
        )
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
    examples["dropped record"] = load.dropped_lines()
    findings = tuple(
        Finding(kind, len(examples[kind]), meaning, tuple(examples[kind][:NUM_EXAMPLES]))
        for kind, meaning in MEANINGS.items()
        if examples[kind]
    )
    return InspectReport(model, load.num_files, load.num_records, sum_facts("all", facts), tuple(facts), findings)


def tree_facts(name: str, forest: Forest, flops: FlopModel | None = None) -> TreeFacts:
    """Sizes of one tree, and its FLOPs for a model."""
    above, calls = forest.segments.parent, calls_of(forest)
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
        flat_flops=flops.flat(forest) if flops else None,
        leaf_flops=flops.leaf(forest) if flops else None,
        tree_flops=flops.tree(forest) if flops else None,
        num_images=len(forest.images.sources),
        num_image_tokens=int((forest.images.end - forest.images.start).sum()),
        num_flat_image_tokens=sum(
            image.end - image.start
            for item in (forest.trajectories if len(forest.images) else ())
            for image in item.images
        ),
        num_calls=len(calls.ends),
        num_call_tokens=int(forest.depth[calls.ends].sum(dtype=np.int64)) + len(calls.ends),
        call_flops=flops.rows(forest, calls.ends, calls.num_trained) if flops else None,
        num_rollouts=int(forest.rollout_of_trajectory.max()) + 1,
    )


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


# -- likely mistakes and waste: kinds, and the trajectories concerned ------------------------------------------------


def suspicions(
    name: str, forest: Forest, max_tokens: int | None = None, text: TokenText | None = None
) -> dict[str, list[str]]:
    """Sources of one tree's trajectories, by kind of finding. max_tokens: a budget; text: finds special tokens, too."""
    sources = sources_of(name, forest)
    _, first = np.unique(forest.segments.end_segment, return_index=True)
    repeated = np.setdiff1d(np.arange(forest.num_trajectories), first)
    single = forest.num_trajectories == 1
    examples = {
        EQUAL_REWARDS: _equal_rewards(name, forest),
        "duplicated trajectory": [sources[index] for index in repeated],
        "hardly any trained token": [
            source
            for source, item in zip(sources, forest.trajectories, strict=True)
            if item.num_trained_tokens < FEW_TRAINED * len(item.token_ids)
        ],
        "very short trajectory": [sources[index] for index in np.flatnonzero(forest.path_lengths < VERY_SHORT)],
        "no sharing": [name] if not single and forest.share_ratio < LITTLE_SHARING else [],
        "single trajectory": [name] if single else [],
        "beyond max_tokens": [name] if max_tokens is not None and forest.num_tokens > max_tokens else [],
    }
    if text is not None and text.has_text:
        examples |= _special_tokens(sources, forest, text)
    return examples


def long_trajectories(lengths: list[np.ndarray], sources: list[list[str]]) -> list[str]:
    """Trajectories of all trees far above the median length, the longest first. lengths: [N] int64 of each tree."""
    all_lengths = np.concatenate(lengths)
    # Where lengths vary widely, many are far from the median; the quantile keeps those out.
    limit = max(LONG_FACTOR * np.median(all_lengths), 2 * np.quantile(all_lengths, 0.95))
    names = [source for each in sources for source in each]
    longest = np.flatnonzero(all_lengths > limit)
    longest = longest[np.argsort(-all_lengths[longest], kind="stable")]
    return [f"{names[index]} ({all_lengths[index]:,} tokens)" for index in longest]


class Duplicates:
    """Finds trajectories whose tokens and images are in another tree, too, by hash."""

    def __init__(self) -> None:
        self._first: dict[bytes, tuple[str, str]] = {}

    def add(self, name: str, forest: Forest, sources: list[str]) -> list[str]:
        """Sources in one tree, each with that of its duplicate."""
        duplicates = []
        for item, source in zip(forest.trajectories, sources, strict=False):
            seen = "".join(f"{image.start} {image.digest}" for image in item.images).encode()
            key = hashlib.blake2b(item.token_ids.tobytes() + seen, digest_size=16).digest()
            tree, original = self._first.setdefault(key, (name, source))
            if tree != name:
                duplicates.append(f"{source}, as {original}")
        return duplicates


def sources_of(name: str, forest: Forest) -> list[str]:
    """Where each trajectory came from: `file:line`, or its index in the tree."""
    return [item.source or f"{name}: trajectory {index}" for index, item in enumerate(forest.trajectories)]


def _equal_rewards(name: str, forest: Forest) -> list[str]:
    """Groups of at least two rollouts whose rewards are all the same."""
    rewards: dict[Any, dict[Any, float]] = defaultdict(dict)
    for index, item in enumerate(forest.trajectories):
        if item.reward is not None:
            rollout = index if item.rollout is None else item.rollout
            rewards[name if item.group is None else item.group][rollout] = item.reward
    return [str(group) for group, each in rewards.items() if len(each) > 1 and len(set(each.values())) == 1]


def _special_tokens(sources: list[str], forest: Forest, text: TokenText) -> dict[str, list[str]]:
    """Special tokens sources they should not be. Shared tokens are looked at once, and placed at one trajectory."""
    searched = forest.token_ids[:MAX_SEARCHED_TOKENS]
    is_special = np.isin(searched, np.array(sorted(text.special_ids), dtype=np.int64))
    spelled = _spelled_out(searched, is_special, text)
    inside = _inside_answers(searched, forest, text)
    return {
        "special token in text": _described(spelled, sources, forest, searched, text),
        "turn ends inside an answer": _described(inside, sources, forest, searched, text),
    }


def _inside_answers(ids: np.ndarray, forest: Forest, text: TokenText) -> np.ndarray:
    """[n] int64 positions of trained tokens that begin or end a text (`turn_ids`) and are followed by the same answer.

    Other special tokens are valid inside answers: tool calls and channels use them. White space that closes a turn does
    not count as a continuation.
    """
    trained = forest.is_trained[: len(ids)]
    goes_on = np.zeros(len(ids), dtype=bool)
    goes_on[:-1] = trained[:-1] & trained[1:] & (forest.parent[1 : len(ids)] == np.arange(len(ids) - 1))
    candidates = np.flatnonzero(goes_on & np.isin(ids, np.array(sorted(text.turn_ids), dtype=np.int64)))
    is_end = [
        not goes_on[position + 1] and not text.read(ids[position + 1 : position + 2]).strip() for position in candidates
    ]
    return candidates[~np.array(is_end, dtype=bool)]


def _spelled_out(ids: np.ndarray, is_special: np.ndarray, text: TokenText) -> np.ndarray:
    """[n] int64 positions of ordinary tokens at which the text of a special token begins."""
    if not text.special_texts:
        return np.zeros(0, dtype=np.int64)
    pieces = text.token_bytes(ids)
    # A special token becomes one byte that no text contains, so no match spans it.
    pieces = [b"\xff" if special else piece for piece, special in zip(pieces, is_special.tolist(), strict=True)]
    ends = np.cumsum([len(piece) for piece in pieces])
    pattern = re.compile(
        b"|".join(re.escape(special_text.encode()) for special_text in text.special_texts if len(special_text) > 2)
        or b"(?!)"
    )
    begins = [match.start() for match in pattern.finditer(b"".join(pieces))]
    return np.unique(np.searchsorted(ends, begins, side="right"))


def _described(
    positions: np.ndarray, sources: list[str], forest: Forest, ids: np.ndarray, text: TokenText, limit: int = 1000
) -> list[str]:
    """For each tree position: the source of the first trajectory through it, the depth, and the text around it."""
    descriptions = []
    segments = forest.segments
    order = np.argsort(segments.end_segment, kind="stable")
    ends = segments.end_segment[order]
    for position in positions[:limit].tolist():
        segment = int(forest.segment_of_token[position])
        below = order[int(np.searchsorted(ends, segment))]
        excerpt = text.read(ids[position : position + 8])[:40]
        descriptions.append(f"{sources[below]}, token {forest.depth[position]:,}: {excerpt!r}")
    return descriptions + ["more"] * max(0, len(positions) - limit)
