"""Where sharing is lost: branches that differ early and agree again later, with their text and the tokens lost.

The cost is the number of tokens of the lighter branch that the heavier one contains in the same order after the first
difference (`alignment.py`). They are computed twice, and would be computed once if the branches did not differ. It is a
lower bound: only the heaviest path below each fork is compared, and runs shorter than `alignment.WINDOW` do not count.
"""

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from treewise.nn.flops import FlopModel
from treewise.report.analysis.alignment import Fork, chain_heads, realigned_forks
from treewise.report.analysis.facts import sources_of
from treewise.report.analysis.token_text import TokenText
from treewise.tree import prefix_merge
from treewise.tree.forest import Forest

MIN_LOST = 32  # tokens
MAX_BRANCHES = 20_000  # per tree, the longest ones
MAX_SHOWN_TOKENS = 48  # of a difference
MAX_READ = 4096  # tokens of a difference from which its cause is read
CONTEXT = 24  # tokens shown before and after it
MAX_ROOT_TOKENS = 16_384  # of a tree, compared with other trees
MAX_COMPARED_TREES = 2048
MAX_SHOWN_FORKS = 30  # inside trees, and as many between them
BETWEEN_TREES = "between trees"

ROUTED = "other experts"
RETOKENISED = "retokenised"
VOLATILE = "time, number or id"
REWRITTEN = "history rewritten"
PROMPT_DIFFERS = "prompt differs"
OTHER_SPEAKER = "another speaker"
OBSERVATION_DIFFERS = "observation differs"
SAMPLED = "sampled apart"
CAUSES = {
    ROUTED: "equal tokens that a mixture sent to other experts: samplers that round alike part less; "
    "routing_replay=by_tokens merges them, which is not exact",
    RETOKENISED: "the same text in other tokens: keep the sampled ids instead of tokenising the text again",
    VOLATILE: "a clock, counter or identifier: move it behind what is shared, or freeze it for a group",
    REWRITTEN: "one branch trains what the other dropped or edited, as a template does that removes reasoning",
    PROMPT_DIFFERS: "prompts that differ, and agree again later: move what differs to their end",
    OTHER_SPEAKER: "a user or a tool began otherwise, and the same followed: the nature of the task",
    OBSERVATION_DIFFERS: "tools or users answered otherwise, and the same followed: a template cannot change it",
    SAMPLED: "both were sampled, and came back to the same tokens: the nature of sampling",
}
AVOIDABLE = (RETOKENISED, VOLATILE, REWRITTEN, PROMPT_DIFFERS)

# What opens a message of a user or a tool in the templates of known families, followed by no other opening.
_SPEAKER = re.compile(
    r"(?:<\|(?:im_start|start_header_id|start|turn)\|?>|<start_of_turn>)\s*(\w+)|(\[INST\])|(\[TOOL_RESULTS\])"
    r"|<[|\uff5c](user|assistant|system|tool|observation|human|developer)\W",
    re.IGNORECASE,
)
_OTHERS = frozenset(("user", "human", "tool", "function", "ipython", "observation", "environment", "customer"))
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DAYS = "mon|tue|wed|thu|fri|sat|sun"
_VOLATILE = re.compile(
    rf"(?:\d|[\s:.,/+\-_]|[tzTZ](?=\d|$)|(?:{_MONTHS}|{_DAYS})[a-z]*|am|pm|utc|gmt)*|[0-9a-fA-F\-]{{6,}}", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Side:
    """One of two branches around their first difference, in text.

    location: the record that it came from. different: the first tokens of the difference; num_hidden_tokens more follow
    before the tokens that both branches hold again (`after`).
    """

    location: str
    token_id: int
    is_trained: bool
    num_different_tokens: int
    num_hidden_tokens: int
    different: str
    after: str


@dataclass(frozen=True, slots=True)
class LostSharing:
    """A fork at which sharing is lost.

    depth: of the first differing token. num_branches: branches that leave here for the same cause.
    num_lost_tokens: of all of them. num_tokens_to_next: of the shown branch, up to the next difference. before: the
    shared text in front. heavy, light: the two branches shown, the most expensive of the fork.
    """

    tree: str
    cause: str
    depth: int
    num_branches: int
    num_lost_tokens: int
    num_tokens_to_next: int
    before: str
    heavy: Side
    light: Side


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A tree to compare. token_ids: [T] int32. is_trained: [T] bool. sources: where each trajectory came from.
    has_routes: branches may part for their experts alone."""

    name: str
    segments: prefix_merge.Segments
    token_ids: np.ndarray
    is_trained: np.ndarray
    sources: Sequence[str]
    has_routes: bool = False


def lost_in_tree(name: str, forest: Forest, text: TokenText) -> tuple[list[LostSharing], int]:
    """Where branches of one tree lose sharing, the most expensive first; and the number of branches not compared."""
    trained = forest.is_trained
    sources = sources_of(name, forest)
    return _lost(TokenTree(name, forest.segments, forest.token_ids, trained, sources, forest.has_routes), text)


def lost_between_trees(trunks: Sequence[TokenTree], text: TokenText) -> tuple[list[LostSharing], np.ndarray]:
    """The same between trees, whose heaviest paths are compared; and with how many tokens each begins like an earlier
    one.

    trunks: the first tokens of each tree's heaviest path. Training merges trees of one batch, so equal beginnings are
    computed once, and a loss is one only where trees meet.
    """
    ids = [trunk.token_ids for trunk in trunks]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in ids])])
    segments = prefix_merge.merge_sequences(np.concatenate(ids), offsets)
    source = segments.token_source
    trained = np.concatenate([trunk.is_trained for trunk in trunks])[source]
    sources = [trunk.sources[0] for trunk in trunks]
    forks, _ = _lost(TokenTree(BETWEEN_TREES, segments, np.concatenate(ids)[source], trained, sources), text)
    num_new = np.bincount(np.searchsorted(offsets, source, side="right") - 1, minlength=len(ids))
    return forks, np.diff(offsets) - num_new


def cause_of(
    texts: tuple[str, str] | None, is_trained: tuple[bool, bool], is_prompt: bool, before: str | None = None
) -> str:
    """Why two branches differ.

    Parameters:
        texts: what differs in each; None without a tokenizer.
        is_trained: whether the first differing token of each is trained.
        is_prompt: no token before the difference is trained.
        before: the text in front of it, from which the speaker is read.
    """
    if texts is not None and texts[0] == texts[1]:
        return RETOKENISED
    if all(is_trained):
        return SAMPLED
    if texts is not None and all(text and _VOLATILE.fullmatch(text) for text in texts):
        return VOLATILE
    if any(is_trained):
        return REWRITTEN
    if not is_prompt:
        return OBSERVATION_DIFFERS
    return OTHER_SPEAKER if before is not None and speaker_of(before) in _OTHERS else PROMPT_DIFFERS


def speaker_of(before: str) -> str | None:
    """The role of the message in which a text ends, as its chat template writes it; None where none is recognised."""
    last = None
    for match in _SPEAKER.finditer(before):
        last = match
    if last is None:
        return None
    word, instruction, result, other = last.groups()
    if instruction or result:
        return "user" if instruction else "tool"
    return str(word or other).lower()


def _lost(tree: TokenTree, text: TokenText) -> tuple[list[LostSharing], int]:
    forks, num_skipped = realigned_forks(tree.segments, tree.token_ids, MAX_BRANCHES)
    # [S] whether a segment or one above it has a trained token; parents come first.
    trained_above = np.logical_or.reduceat(tree.is_trained, tree.segments.start).tolist()
    for segment, above in enumerate(tree.segments.parent.tolist()):
        if above >= 0:
            trained_above[segment] = trained_above[segment] or trained_above[above]
    groups: dict[tuple[int, str], list[Fork]] = defaultdict(list)
    for fork in forks:
        if fork.num_common_tokens >= MIN_LOST:
            groups[fork.first_heavy, _cause(tree, fork, text, trained_above)].append(fork)
    shown = [_shown(tree, cause, members, text) for (_, cause), members in groups.items()]
    return sorted(shown, key=lambda each: -each.num_lost_tokens), num_skipped


def _cause(tree: TokenTree, fork: Fork, text: TokenText, trained_above: list[bool]) -> str:
    light, heavy = (int(value) for value in fork.runs[0, :2])
    first = (fork.first_heavy, fork.first_light)
    if tree.has_routes and tree.token_ids[first[0]] == tree.token_ids[first[1]]:
        return ROUTED
    texts = None
    if text.has_text:
        ranges = zip(first, (heavy, light), strict=True)
        heavy_text, light_text = (text.read(tree.token_ids[low : min(high, low + MAX_READ)]) for low, high in ranges)
        texts = heavy_text, light_text
    is_trained = bool(tree.is_trained[first[0]]), bool(tree.is_trained[first[1]])
    is_prompt = fork.parent < 0 or not trained_above[fork.parent]
    before = text.read(_before(tree, fork, MAX_READ)) if is_prompt and text.has_text else None
    return cause_of(texts, is_trained, is_prompt, before)


def _shown(tree: TokenTree, cause: str, forks: list[Fork], text: TokenText) -> LostSharing:
    worst = max(forks, key=lambda fork: fork.num_common_tokens)
    light, heavy, to_next = (int(value) for value in worst.runs[0])
    before = _before(tree, worst)
    segment = int(np.searchsorted(tree.segments.start, worst.first_light, side="right") - 1)
    return LostSharing(
        tree=tree.name,
        cause=cause,
        depth=int(tree.segments.depth[segment]),
        num_branches=len(forks),
        num_lost_tokens=sum(fork.num_common_tokens for fork in forks),
        num_tokens_to_next=to_next,
        before=text.read(before),
        heavy=_side(tree, worst.first_heavy, heavy, text),
        light=_side(tree, worst.first_light, light, text),
    )


def _before(tree: TokenTree, fork: Fork, limit: int = CONTEXT) -> np.ndarray:
    """The last shared tokens before a fork."""
    path = prefix_merge.path_to(tree.segments, fork.parent) if fork.parent >= 0 else np.zeros(0, dtype=np.int64)
    return tree.token_ids[path[-limit:]]


def _side(tree: TokenTree, first: int, common: int, text: TokenText) -> Side:
    different = tree.token_ids[first:common]
    return Side(
        location=_location(tree, first),
        token_id=int(tree.token_ids[first]),
        is_trained=bool(tree.is_trained[first]),
        num_different_tokens=len(different),
        num_hidden_tokens=max(0, len(different) - MAX_SHOWN_TOKENS),
        different=text.read(different[:MAX_SHOWN_TOKENS]),
        after=text.read(tree.token_ids[common : common + CONTEXT]),
    )


def _location(tree: TokenTree, position: int) -> str:
    """The first trajectory through a tree position."""
    segment = int(np.searchsorted(tree.segments.start, position, side="right") - 1)
    ends = np.where(tree.segments.end_segment >= segment, tree.segments.end_segment, len(tree.segments.start))
    return tree.sources[int(np.argmin(ends))]


# -- over a whole data set: totals by cause, and the most expensive forks --------------------------------------------


@dataclass(frozen=True, slots=True)
class CauseTotal:
    """One cause over all trees. is_avoidable: a change of templates or data handling can likely remove it."""

    cause: str
    meaning: str
    is_avoidable: bool
    num_forks: int
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class LostReport:
    """Lost sharing inside trees and between them, with the numbers of branches and trees that were not compared.

    causes: totals inside trees. causes_between: totals between trees, of their first tokens. num_shared_between: tree
    tokens with which a tree begins like an earlier one.
    """

    causes: tuple[CauseTotal, ...]
    forks: tuple[LostSharing, ...]
    causes_between: tuple[CauseTotal, ...]
    forks_between: tuple[LostSharing, ...]
    num_branches_not_compared: int
    num_trees_compared: int
    num_trees: int
    num_shared_between: int = 0
    flops_shared_between: float | None = None
    max_branches_per_tree: int = MAX_BRANCHES
    max_tokens_between_trees: int = MAX_ROOT_TOKENS

    @property
    def num_lost_tokens(self) -> int:
        """Tree tokens that are computed twice inside trees, for whatever cause."""
        return sum(cause.num_lost_tokens for cause in self.causes)

    @property
    def num_avoidable_tokens(self) -> int:
        """Tree tokens that are computed twice for an avoidable cause, inside trees."""
        return sum(cause.num_lost_tokens for cause in self.causes if cause.is_avoidable)

    @property
    def num_avoidable_tokens_between(self) -> int:
        """Tree tokens that are computed twice for an avoidable cause, in different trees."""
        return sum(each.num_lost_tokens for each in self.causes_between if each.is_avoidable)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = ("num_lost_tokens", "num_avoidable_tokens", "num_avoidable_tokens_between")
        return {name: getattr(self, name) for name in names} | asdict(self)


class LostCollector:
    """Adds trees one at a time; keeps totals, the most expensive forks, and the first tokens of each tree."""

    def __init__(self, text: TokenText, flops: FlopModel | None = None) -> None:
        self._text, self._flops = text, flops
        self._forks, self._tokens = Counter[str](), Counter[str]()  # by cause
        self._kept: list[tuple[int, int, LostSharing]] = []
        self._trunks: list[TokenTree] = []
        self._num_skipped = self._num_trees = 0

    def add(self, name: str, forest: Forest) -> int:
        """Adds one tree; returns the number of its tokens that could likely be saved."""
        in_tree, num_skipped = lost_in_tree(name, forest, self._text)
        self._num_trees += 1
        self._num_skipped += num_skipped
        for each in in_tree:
            self._forks[each.cause] += 1
            self._tokens[each.cause] += each.num_lost_tokens
            # Avoidable causes are shown first; forks that were sampled apart are many and cannot be avoided.
            rank = each.num_lost_tokens if each.cause in AVOIDABLE else each.num_lost_tokens - 2**40
            heapq.heappush(self._kept, (rank, -self._forks.total(), each))
            if len(self._kept) > MAX_SHOWN_FORKS:
                heapq.heappop(self._kept)
        if len(self._trunks) < MAX_COMPARED_TREES:
            heads = chain_heads(forest.segments)
            begins = np.append(forest.segments.start[heads], forest.num_tokens)
            end = min(int(begins[1]), MAX_ROOT_TOKENS)  # of the heaviest path
            trained = forest.is_trained[:end]
            self._trunks.append(TokenTree(name, forest.segments, forest.token_ids[:end].copy(), trained, (name,)))
        return sum(each.num_lost_tokens for each in in_tree if each.cause in AVOIDABLE)

    def result(self) -> LostReport:
        """The report; compares the trees with one another."""
        between, num_shared = list[LostSharing](), np.zeros(0, dtype=np.int64)
        if len(self._trunks) > 1:
            between, num_shared = lost_between_trees(self._trunks, self._text)
        forks, tokens = Counter(each.cause for each in between), Counter[str]()
        for each in between:
            tokens[each.cause] += each.num_lost_tokens
        return LostReport(
            _causes(self._forks, self._tokens),
            tuple(each for _, _, each in sorted(self._kept, reverse=True)),
            _causes(forks, tokens),
            tuple(each for each in between if each.cause in AVOIDABLE)[:MAX_SHOWN_FORKS],
            self._num_skipped,
            len(self._trunks),
            self._num_trees,
            int(num_shared.sum()),
            None if self._flops is None else sum(self._flops.of_tokens(np.arange(each)).sum() for each in num_shared),
        )


def _causes(forks: Counter[str], tokens: Counter[str]) -> tuple[CauseTotal, ...]:
    found = [(cause, meaning) for cause, meaning in CAUSES.items() if forks[cause]]
    return tuple(CauseTotal(cause, text, cause in AVOIDABLE, forks[cause], tokens[cause]) for cause, text in found)
