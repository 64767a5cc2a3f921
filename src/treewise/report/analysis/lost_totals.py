"""Lost sharing over a whole data set: totals by cause, and the most expensive forks."""

import heapq
from dataclasses import asdict, dataclass
from typing import Any

from treewise.report.analysis.lost_sharing import (
    AVOIDABLE,
    CAUSES,
    MAX_BRANCHES,
    MAX_COMPARED_TREES,
    MAX_ROOT_TOKENS,
    LostSharing,
    TokenTree,
    lost_between_trees,
    lost_in_tree,
    trunk_of,
)
from treewise.report.analysis.token_text import TokenText
from treewise.tree.forest import Forest

MAX_SHOWN_FORKS = 30  # inside trees, and as many between them


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

    causes: totals inside trees. causes_between: totals between trees, of their first tokens.
    """

    causes: tuple[CauseTotal, ...]
    forks: tuple[LostSharing, ...]
    causes_between: tuple[CauseTotal, ...]
    forks_between: tuple[LostSharing, ...]
    num_branches_not_compared: int
    num_trees_compared: int
    num_trees: int
    max_branches_per_tree: int = MAX_BRANCHES
    max_tokens_between_trees: int = MAX_ROOT_TOKENS

    @property
    def num_avoidable_tokens(self) -> int:
        """Tree tokens that are computed twice for an avoidable cause, inside trees."""
        return sum(each.num_lost_tokens for each in self.causes if each.is_avoidable)

    @property
    def num_avoidable_tokens_between(self) -> int:
        return sum(each.num_lost_tokens for each in self.causes_between if each.is_avoidable)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        totals = {
            "num_avoidable_tokens": self.num_avoidable_tokens,
            "num_avoidable_tokens_between": self.num_avoidable_tokens_between,
        }
        return totals | asdict(self)


class LostCollector:
    """Adds trees one at a time; keeps totals, the most expensive forks, and the first tokens of each tree."""

    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._totals: dict[str, list[int]] = {cause: [0, 0] for cause in CAUSES}
        self._kept: list[tuple[int, int, LostSharing]] = []
        self._trunks: list[TokenTree] = []
        self._num_skipped = self._num_trees = self._num_found = 0

    def add(self, name: str, forest: Forest) -> int:
        """Adds one tree; returns the number of its tokens that could likely be saved."""
        in_tree, num_skipped = lost_in_tree(name, forest, self._text)
        self._num_trees += 1
        self._num_skipped += num_skipped
        for each in in_tree:
            self._totals[each.cause][0] += 1
            self._totals[each.cause][1] += each.num_lost_tokens
            # Avoidable causes are shown first; forks that were sampled apart are many and cannot be avoided.
            rank = each.num_lost_tokens if each.cause in AVOIDABLE else each.num_lost_tokens - 2**40
            self._num_found += 1
            heapq.heappush(self._kept, (rank, -self._num_found, each))
            if len(self._kept) > MAX_SHOWN_FORKS:
                heapq.heappop(self._kept)
        if len(self._trunks) < MAX_COMPARED_TREES:
            self._trunks.append(trunk_of(name, forest))
        return sum(each.num_lost_tokens for each in in_tree if each.cause in AVOIDABLE)

    def result(self) -> LostReport:
        """The report; compares the trees with one another."""
        between: list[LostSharing] = []
        if len(self._trunks) > 1:
            between, _ = lost_between_trees(self._trunks, self._text)
        totals: dict[str, list[int]] = {cause: [0, 0] for cause in CAUSES}
        for each in between:
            totals[each.cause][0] += 1
            totals[each.cause][1] += each.num_lost_tokens
        avoidable = [each for each in between if each.cause in AVOIDABLE]
        return LostReport(
            _causes(self._totals),
            tuple(each for _, _, each in sorted(self._kept, reverse=True)),
            _causes(totals),
            tuple(avoidable[:MAX_SHOWN_FORKS]),
            self._num_skipped,
            len(self._trunks),
            self._num_trees,
        )


def _causes(totals: dict[str, list[int]]) -> tuple[CauseTotal, ...]:
    return tuple(
        CauseTotal(cause, CAUSES[cause], cause in AVOIDABLE, *totals[cause]) for cause in CAUSES if totals[cause][0]
    )
