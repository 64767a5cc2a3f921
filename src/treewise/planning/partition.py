"""Open and closed tokens of a forest under a budget, and the groups that open tokens are computed in.

A token whose subtree fits the budget is closed; all others are open, a connected top of every tree. The maximal closed
subtrees are the *pieces*, each a contiguous range of tree positions. Open tokens are cut, at any token, into *trunks*:
groups of at most the budget, each below one parent trunk, so trunks form a tree and a depth-first walk over it keeps
the gateways of one path alive.

Letters: S segments, P pieces.
"""

from dataclasses import dataclass, field

import numpy as np

from treewise.errors import PlanError
from treewise.planning.bin_packing import best_fit
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import Segments

# Relative costs. A micro-batch, in tokens of forward and backward; a token's forward, of its forward and backward.
TOKENS_PER_LAUNCH = 64
FORWARD_FRACTION = 1 / 3
# The backward of attention in forwards (FlashAttention-2, arXiv 2307.08691, recomputes the scores); a pair's forward.
ATTENTION_BACKWARD = 2.5
PAIR_FORWARD_FRACTION = 1 / (1 + ATTENTION_BACKWARD)


@dataclass(slots=True)
class Trunk:
    """Open tokens computed together.

    ranges: tree positions `[start, end)`, ascending. parent: index of the trunk above, or -1. room: tokens that may run
    while this trunk is alive (less than the budget only below held ones). is_held: its graph is kept.
    """

    ranges: list[tuple[int, int]]
    parent: int
    room: int
    is_held: bool = False
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum(end - start for start, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Partition:
    """piece_start, piece_size: [P] int64, ascending. piece_trunk: [P] int64, the trunk above each piece, or -1."""

    piece_start: np.ndarray
    piece_size: np.ndarray
    piece_trunk: np.ndarray
    trunks: list[Trunk]


def partition(forest: Forest, budget: int, hold: str, piece_tokens: int | None = None) -> Partition:
    """Cuts a forest for a budget of tokens. hold: `auto`, `never` or `always` (wherever it is possible). piece_tokens:
    the most of a piece, if fewer than the budget: smaller pieces fill micro-batches better, and more tokens are open.

    Raises:
        PlanError: an image that has more tokens than the budget.
    """
    images = forest.images if forest.has_images else None
    if images is not None and images.largest > budget:
        raise PlanError(
            f"an image has {images.largest} tokens, and none is cut: max_tokens={budget} must be at least that."
        )
    start, end = (None, None) if images is None else (images.start, images.end)
    cut = _Cut(forest.segments, budget, hold, start, end, piece_tokens)
    cut.cut_trunks()
    return Partition(cut.piece_start, cut.piece_size, cut.trunk_of_pieces(), cut.trunks)


def cut_trunks(segments: Segments, budget: int, hold: str) -> list[Trunk]:
    """Only the trunks, from a forest's segments; images are not regarded."""
    cut = _Cut(segments, budget, hold)
    cut.cut_trunks()
    return cut.trunks


class _Cut:
    """Cuts one forest; `trunks` grows in depth-first order.

    image_start, image_end: [I] int64 tree positions of images, ascending; no cut is inside of one.
    """

    def __init__(
        self,
        segments: Segments,
        budget: int,
        hold: str,
        image_start: np.ndarray | None = None,
        image_end: np.ndarray | None = None,
        piece_tokens: int | None = None,
    ) -> None:
        self.segments, self.budget, self.hold = segments, budget, hold
        none = np.zeros(0, dtype=np.int64)
        self.image_start = none if image_start is None else image_start
        self.image_end = none if image_end is None else image_end
        self.start = segments.start
        self.length = segments.lengths
        self.subtree_end = segments.subtree_end
        self.after = np.searchsorted(self.start, self.subtree_end)
        # A token is open when more tokens than a piece may have lie from it to the end of its subtree.
        most = budget if piece_tokens is None else piece_tokens
        self.num_open = np.clip(self.subtree_end - most - self.start, 0, self.length)
        if len(self.image_start):  # an image that is open in part is open as a whole
            boundary = self.start + self.num_open
            image = self._image_around(boundary)
            self.num_open = np.where(image >= 0, self.image_end[image] - self.start, self.num_open)
        self.open_before = np.concatenate([[0], np.cumsum(self.num_open)])
        self.trunks: list[Trunk] = []
        # A piece begins at the first closed token of a segment whose parents are all open.
        is_full = self.num_open == self.length
        first = ((segments.parent < 0) | is_full[segments.parent]) & ~is_full
        self.piece_start = (self.start + self.num_open)[first]
        self.piece_size = self.subtree_end[first] - self.piece_start
        self._children: dict[int, list[int]] = {}  # open ones
        for segment in np.flatnonzero(self.num_open > 0).tolist():
            self._children.setdefault(int(segments.parent[segment]), []).append(segment)

    def _image_around(self, boundary: np.ndarray) -> np.ndarray:
        """[n] int64, the image that a cut before each tree position ([n] int64) would be inside of; -1: none."""
        image = np.searchsorted(self.image_start, boundary, side="left") - 1
        is_inside = (image >= 0) & (boundary < self.image_end[image])
        return np.where(is_inside, image, -1)

    def cut_trunks(self) -> None:
        # A stub is an open subtree still to be cut: a segment and how many of its open tokens are already taken. The
        # stack holds trunks whose turn is still to come, so their order is depth-first and parents come first.
        stack = self._cut_stubs(-1, [(segment, 0) for segment in self._children.get(-1, [])])[::-1]
        while stack:
            trunk, below = stack.pop()
            self.trunks.append(trunk)
            stack.extend(self._cut_stubs(len(self.trunks) - 1, below)[::-1])

    def _cut_stubs(self, parent: int, stubs: list[tuple[int, int]]) -> list[tuple[Trunk, list[tuple[int, int]]]]:
        """Trunks for the stubs below one parent, each with the stubs below it: small stubs share a trunk."""
        trunks: list[tuple[Trunk, list[tuple[int, int]]]] = []
        together: list[tuple[int, int]] = []
        together_size = 0
        for segment, taken in stubs:
            size = self._stub_size(segment, taken)
            if self._should_hold(segment, taken, size):
                ranges, _ = self._take(segment, taken, size)
                trunks.append((Trunk(ranges, parent, self.budget - size, is_held=True), []))
            elif size > self.budget:
                ranges, below = self._take(segment, taken, self.budget)
                trunks.append((Trunk(ranges, parent, self.budget), below))
            else:
                if together_size + size > self.budget:
                    trunks.append((self._join(together, parent), []))
                    together, together_size = [], 0
                together.append((segment, taken))
                together_size += size
        if together:
            trunks.append((self._join(together, parent), []))
        return trunks

    def _join(self, stubs: list[tuple[int, int]], parent: int) -> Trunk:
        ranges = []
        for segment, taken in stubs:
            ranges += self._take(segment, taken, self._stub_size(segment, taken))[0]
        return Trunk(_join_touching(ranges), parent, self.budget)

    def _stub_size(self, segment: int, taken: int) -> int:
        return int(self.open_before[self.after[segment]] - self.open_before[segment]) - taken

    def _take(self, segment: int, taken: int, room: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The first `room` open tokens of a stub in depth-first order, and the stubs left below them."""
        ranges: list[tuple[int, int]] = []
        below: list[tuple[int, int]] = []
        stack = [(segment, taken)]
        while stack:
            current, skip = stack.pop()
            if room == 0:
                below.append((current, skip))
                continue
            count = min(int(self.num_open[current]) - skip, room)
            begin = int(self.start[current]) + skip
            room -= count
            if len(self.image_start) and (image := int(self._image_around(np.array([begin + count]))[0])) >= 0:
                count, room = int(self.image_start[image]) - begin, 0  # the image begins the next trunk
            if count:
                ranges.append((begin, begin + count))
            if skip + count < self.num_open[current]:
                below.append((current, skip + count))
            else:
                stack.extend((child, 0) for child in reversed(self._children.get(current, [])))
        return _join_touching(ranges), below

    def _should_hold(self, segment: int, taken: int, size: int) -> bool:
        """Whether keeping the graph of all these open tokens costs less than running them twice."""
        if self.hold == "never" or size >= self.budget:
            return False
        low = int(self.start[segment]) + taken
        first, last = np.searchsorted(self.piece_start, [low, int(self.subtree_end[segment])])
        sizes = self.piece_size[first:last]
        room = self.budget - size
        if sizes.max() > room:
            return False
        if self.hold == "always":
            return True
        launches_held = 1 + len(best_fit(sizes.tolist(), room))
        launches_twice = 2 + len(best_fit(sizes.tolist(), self.budget))
        return TOKENS_PER_LAUNCH * (launches_held - launches_twice) <= FORWARD_FRACTION * size

    def trunk_of_pieces(self) -> np.ndarray:
        """[P] the trunk that holds the token before each piece, -1 for a whole tree."""
        bounds = sorted((start, end, index) for index, trunk in enumerate(self.trunks) for start, end in trunk.ranges)
        result = np.full(len(self.piece_start), -1, dtype=np.int64)
        if not bounds:
            return result
        starts = np.array([start for start, _, _ in bounds])
        trunks = np.array([index for _, _, index in bounds])
        segment = np.searchsorted(self.start, self.piece_start, side="right") - 1
        above = self.segments.parent[segment]
        last = np.where(above >= 0, (self.start + self.length)[above] - 1, -1)
        before = np.where(self.piece_start == self.start[segment], last, self.piece_start - 1)
        inner = before >= 0
        result[inner] = trunks[np.searchsorted(starts, before[inner], side="right") - 1]
        return result


def _join_touching(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending ranges with touching ones joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
