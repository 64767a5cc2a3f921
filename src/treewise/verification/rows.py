"""Rows for a verification: the first ones of a data set that take seconds, and shorter ones for a small budget.

Rows are made shorter by leaving out tokens within segments, so every fork stays, and so does a trained token of each.
Faults of what crosses micro-batches may act below several gateways only, in late pieces, or where the rows that a piece
reads of a gateway have a gap; a budget that is small beside the trees has all of these, and on short rows it takes
seconds. Faults beyond the first rows of a micro-batch, or in a second tree, need whole trees.

Letters: T tokens of a forest, L tokens of one trajectory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from treewise.planning.planner import plan as make_plan
from treewise.planning.plans import Plan, lay_out
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

NUM_LEVELS, NUM_PIECES = 4, 5  # of a small budget's plan: gateways on a path, closed micro-batches
MAX_MICRO_BATCHES = 24  # of such a plan, each of which takes a pass over the weights
MAX_SEGMENTS = 24
LEAST_ROWS = (4, 2)  # of the first trees, so that there is something to share
TOKENS_PER_SEGMENT = (8, 12, 18)  # the first is taken that has a budget with all of these


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What a plan exercises: gateways on its longest path, whether a piece reads rows of a gateway that are not
    neighbours, and its closed micro-batches."""

    num_levels: int
    has_gap: bool
    num_pieces: int

    @classmethod
    def of(cls, plan: Plan) -> "PlanFacts":
        """Counts levels of gateways and gaps of their rows over the micro-batches of a plan."""
        levels: list[int] = []  # of gateways, down to and with each micro-batch
        has_gap = False
        for index, batch in enumerate(plan.micro_batches):
            levels.append(max((levels[above] for above in batch.parents), default=0) + batch.is_open)
            has_gap |= any(rows[-1] - rows[0] >= len(rows) for _, rows in lay_out(plan, index).gateway)
        return cls(max(levels), has_gap, plan.num_closed_micro_batches)

    @property
    def score(self) -> tuple[bool, bool, bool]:
        """Which of the things that a small budget is for it has."""
        return self.num_levels >= NUM_LEVELS, self.has_gap, self.num_pieces >= NUM_PIECES


def small_plans(forest: Forest, *, whole_groups: bool = False) -> list[Plan]:
    """Plans of the forest's first rows, cut short, under the smallest budgets that are feasible and have four levels of
    gateways, a gap and five pieces: one plan, or where none has all of it, one with the levels and one with a gap.

    whole_groups: rows of a group stay together.
    """
    found: list[tuple[tuple[bool, bool, bool], Plan]] = []
    for num_tokens in TOKENS_PER_SEGMENT:
        short = shortened(_first_segments(forest, whole_groups=whole_groups), num_tokens)
        plans = (make_plan(short, budget) for budget in range(1, short.num_tokens // 2 + 1))
        found += [(PlanFacts.of(each).score, each) for each in plans if each.num_micro_batches <= MAX_MICRO_BATCHES]
        if any(all(score) for score, _ in found):
            break
    if not found:
        return []
    best_score, best = max(found, key=lambda each: sum(each[0]))  # the first of equals: the smallest
    others = [plan for (_, has_gap, _), plan in found if has_gap]
    return [best] if best_score[1] or not others else [best, others[0]]


def _first_segments(forest: Forest, *, whole_groups: bool) -> Forest:
    """The first trajectories of a forest, at least two of them, as long as they have few segments."""
    owner = np.searchsorted(forest.segments.start, forest.path_index, side="right") - 1
    bounds, seen, items = forest.path_offsets, set[int](), forest.trajectories
    for count, (start, end) in enumerate(pairwise(bounds.tolist())):
        seen |= set(owner[start:end].tolist())
        if len(seen) > MAX_SEGMENTS and count >= 2:
            break
    else:
        return forest
    if whole_groups:
        groups = {item.group for item in items[:count]}
        return of_trees(forest, [index for index, item in enumerate(items) if item.group in groups])
    return of_trees(forest, range(count))


# -- making rows shorter ----------------------------------------------------------------------------------------------


def shortened(forest: Forest, num_tokens: int, *, with_images: bool = False) -> Forest:
    """The forest with at most `num_tokens` tokens of each segment, and the last trained one of each trajectory.

    with_images: all tokens of images are kept; else none is, and the images are left out.
    """
    segments = forest.segments
    offset_T = np.arange(forest.num_tokens) - np.repeat(segments.start, segments.lengths)
    is_kept_T = offset_T < num_tokens
    covered_T = forest.images.covers(forest.num_tokens)
    paths = [np.asarray(path) for path in forest.paths]
    for path, item in zip(paths, forest.trajectories, strict=True):
        is_trained = (item.loss_weights != 0) & (np.arange(len(item)) > 0) & ~covered_T[path]
        is_kept_T[path[np.flatnonzero(is_trained)[-1:]]] = True
    is_kept_T = is_kept_T | covered_T if with_images else is_kept_T & ~covered_T
    items = [_part(item, is_kept_T[path]) for path, item in zip(paths, forest.trajectories, strict=True)]
    return of_trees(forest, [index for index, each in enumerate(items) if each is not None], items)


def _part(item: Trajectory, is_kept_L: np.ndarray) -> Trajectory | None:
    """The trajectory with some of its tokens; None where none would be trained."""
    streams = {name: stream[is_kept_L] for name, stream in item.streams.items()}
    if np.count_nonzero(is_kept_L) < 2 or not streams["loss_weights"][1:].any():
        return None
    before = np.concatenate([[0], np.cumsum(is_kept_L)])
    images: list[ImageSpan] = [
        replace(image, start=int(before[image.start]), end=int(before[image.end]))
        for image in item.images
        if is_kept_L[image.start : image.end].all()
    ]
    return replace(item, token_ids=item.token_ids[is_kept_L], images=tuple(images), **streams)


def trees_of(forest: Forest) -> list[int]:
    """[N] the tree of each trajectory: the position of its root."""
    return [int(path[0]) for path in forest.paths]


def of_trees(forest: Forest, chosen: Sequence[int], items: Sequence[Trajectory | None] | None = None) -> Forest:
    """Some trajectories of a forest, or others in their places, in trees that stay apart where they were.

    items: in place of all of the forest's.
    """
    given: Sequence[Trajectory | None] = forest.trajectories if items is None else items
    trees: dict[int, list[Trajectory]] = {}
    roots = trees_of(forest)
    for index in chosen:
        item = given[index]
        assert item is not None
        trees.setdefault(roots[index], []).append(item)
    return Forest.concatenate([Forest.from_trajectories(each) for each in trees.values()])


# -- the first rows ---------------------------------------------------------------------------------------------------


def first_rows(trees: Sequence[Sequence[Trajectory]], limit: int, *, whole_groups: bool = False) -> tuple[Forest, bool]:
    """The first trajectories of several trees, about `limit` flat tokens in all: half of these from the first tree, the
    others from those that follow; four of the first tree and two of a second at least. Where these alone have more,
    tokens within segments are left out, which is the second result.

    limit: 0 for all. whole_groups: rows of a group stay together, and with them all of a tree.
    """
    chosen: list[list[Trajectory]] = []
    total = 0
    for index, tree in enumerate(trees):
        if limit and total >= limit and index > 1:
            break
        part = list(tree)
        if limit and not whole_groups:
            room = limit // 2 if index == 0 else limit - total
            count = int(np.searchsorted(np.cumsum([len(item) for item in tree]), room, side="right"))
            part = part[: max(count, LEAST_ROWS[index] if index < len(LEAST_ROWS) else 0)]
        chosen += [part] if part else []
        total += sum(map(len, part))
    forest = Forest.concatenate([Forest.from_trajectories(each) for each in chosen])
    if not limit or forest.num_flat_tokens <= limit:
        return forest, False
    low, high = 1, int(forest.segments.lengths.max())
    while low < high:  # the most tokens of a segment with which they fit
        middle = (low + high + 1) // 2
        fits = shortened(forest, middle, with_images=True).num_flat_tokens <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return shortened(forest, low, with_images=True), True
