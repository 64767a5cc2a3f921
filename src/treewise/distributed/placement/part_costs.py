"""The cost of open tokens where trees are cut: less than in the whole tree, and different for every cut.

A token is open where its subtree exceeds the budget, so a tree that is too large for one micro-batch computes its top
twice, and its parts on several ranks may not. An additive cost per leaf cannot express that. So the first placement
uses the costs of whole trees; then the costs of its actual parts are computed, and the next placement uses those.

Letters: N trajectories, R ranks, S segments.
"""

from dataclasses import dataclass

import numpy as np

from treewise.distributed.placement.image_costs import ImageCosts
from treewise.distributed.placement.leaf_costs import StepCosts, slice_of
from treewise.distributed.placement.search import loads_of
from treewise.tree.prefix_merge import restrict


@dataclass(frozen=True, slots=True)
class PartCosts:
    """loads: [R] int64, cost of each rank. recompute: [S] int64, extra cost of open tokens and of images that another
    rank computes, too, the mean over parts.
    """

    loads: np.ndarray
    recompute: np.ndarray


def part_costs(step: StepCosts, rank_N: np.ndarray, num_ranks: int) -> PartCosts:
    """Costs of a placement, with every part of a tree planned by itself.

    rank_N: [N] int64, the rank of each trajectory.
    """
    loads, tokens_R = (_loads(step, units, rank_N, num_ranks) for units in (step.once, step.segments.lengths))
    recompute = step.recompute.copy()
    segments = step.segments
    roots = np.flatnonzero(segments.parent < 0)
    bounds = np.append(roots, len(recompute))
    by_segment = np.argsort(segments.end_segment, kind="stable")
    ends = np.searchsorted(segments.end_segment[by_segment], bounds)
    cost_of_tree, num_open_of_tree = np.add.reduceat(step.recompute, roots), np.add.reduceat(step.num_open, roots)
    for tree in np.flatnonzero(num_open_of_tree).tolist():
        members = by_segment[ends[tree] : ends[tree + 1]]
        ranks = np.unique(rank_N[members])
        if len(ranks) == 1:
            loads[ranks[0]] += cost_of_tree[tree]
            tokens_R[ranks[0]] -= num_open_of_tree[tree]
            continue
        first, stop = int(bounds[tree]), int(bounds[tree + 1])
        whole = slice_of(segments, first, stop, members)
        total, count = np.zeros(stop - first, dtype=np.int64), np.zeros(stop - first, dtype=np.int64)
        for rank in ranks.tolist():
            part = restrict(whole, np.flatnonzero(rank_N[members] == rank))
            units, num_open = step.open_part(part)
            loads[rank] += units.sum()
            tokens_R[rank] -= num_open.sum()
            source = np.searchsorted(whole.start, part.source)
            np.add.at(total, source, units)
            np.add.at(count, source, 1)
        recompute[first:stop] = total // count
    if step.images is not None and num_ranks > 1:
        image_loads, image_units = _repeated_images(step, step.images, rank_N, num_ranks)
        loads += image_loads
        recompute += image_units
    return PartCosts(loads + _last_launch(step, tokens_R, loads > 0), recompute)


def _repeated_images(
    step: StepCosts, images: ImageCosts, rank_N: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cost of images on ranks that do not have the first place of the step, in units: [R] int64 of each rank, [S] int64
    of each segment, the mean over the ranks that compute it.
    """
    num_segments = len(step.once)
    once = images.at_first_places(np.ones(num_segments, dtype=bool))
    loads, total = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_segments)
    count = np.zeros(num_segments, dtype=np.int64)
    for rank in np.unique(rank_N).tolist():
        own, is_computed = images.at_first_places_of(rank_N == rank)
        repeated = np.where(is_computed, own - once, 0.0) / step.seconds_per_unit
        loads[rank] = round(repeated.sum())
        total += repeated
        count += is_computed
    return loads, np.round(total / np.maximum(count, 1)).astype(np.int64)


def _loads(step: StepCosts, units: np.ndarray, rank_N: np.ndarray, num_ranks: int) -> np.ndarray:
    leaves = step.leaves_with(units)
    owners = np.empty(len(leaves.new), dtype=np.int64)
    owners[leaves.of_trajectory] = rank_N
    return loads_of(leaves, owners, num_ranks)


def _last_launch(step: StepCosts, closed_R: np.ndarray, has_any_R: np.ndarray) -> np.ndarray:
    """[R] int64, extra cost of a rank's last micro-batch of closed tokens, which is not full."""
    full = 0.0 if step.max_tokens is None else closed_R / step.max_tokens
    missing = (np.maximum(np.ceil(full), 1) - full) * has_any_R
    return np.round(missing * step.cost.seconds_per_micro_batch / step.seconds_per_unit).astype(np.int64)
