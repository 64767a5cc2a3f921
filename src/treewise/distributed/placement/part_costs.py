"""What open tokens cost where trees are cut: less than in the whole tree, and another amount for every cut.

A token is open where its subtree exceeds the budget, so a tree that is too large for one micro-batch computes the top
twice, and its parts on several ranks may not. No cost per leaf can say that. So a placement is found with the costs of
whole trees first; then the parts that it makes are priced as they are, and it is found again with those prices.

Letters: N trajectories, R ranks, S segments.
"""

from dataclasses import dataclass

import numpy as np

from treewise.distributed.placement.leaf_costs import Priced, slice_of
from treewise.distributed.placement.local_search import loads_of
from treewise.tree.prefix_merge import restrict


@dataclass(frozen=True, slots=True)
class PartCosts:
    """loads: [R] int64, all that each rank computes. again: [S] int64, what open tokens cost, the mean of the parts."""

    loads: np.ndarray
    again: np.ndarray


def part_costs(step: Priced, rank_N: np.ndarray, num_ranks: int) -> PartCosts:
    """What a placement costs when every part of a tree is priced by itself.

    rank_N: [N] int64, the rank of each trajectory.
    """
    loads, tokens_R = (_loads(step, units, rank_N, num_ranks) for units in (step.once, step.segments.lengths))
    again = step.again.copy()
    segments = step.segments
    roots = np.flatnonzero(segments.parent < 0)
    bounds = np.append(roots, len(again))
    by_segment = np.argsort(segments.end_segment, kind="stable")
    ends = np.searchsorted(segments.end_segment[by_segment], bounds)
    cost_of_tree, num_open_of_tree = np.add.reduceat(step.again, roots), np.add.reduceat(step.num_open, roots)
    for tree in np.flatnonzero(num_open_of_tree).tolist():
        own = by_segment[ends[tree] : ends[tree + 1]]
        ranks = np.unique(rank_N[own])
        if len(ranks) == 1:
            loads[ranks[0]] += cost_of_tree[tree]
            tokens_R[ranks[0]] -= num_open_of_tree[tree]
            continue
        first, stop = int(bounds[tree]), int(bounds[tree + 1])
        whole = slice_of(segments, first, stop, own)
        total, count = np.zeros(stop - first, dtype=np.int64), np.zeros(stop - first, dtype=np.int64)
        for rank in ranks.tolist():
            part = restrict(whole, np.flatnonzero(rank_N[own] == rank))
            units, num_open = step.open_part(part)
            loads[rank] += units.sum()
            tokens_R[rank] -= num_open.sum()
            where = np.searchsorted(whole.start, part.source)
            np.add.at(total, where, units)
            np.add.at(count, where, 1)
        again[first:stop] = total // count
    return PartCosts(loads + _of_last_launch(step, tokens_R, loads > 0), again)


def _loads(step: Priced, units: np.ndarray, rank_N: np.ndarray, num_ranks: int) -> np.ndarray:
    leaves = step.leaves_with(units)
    owners = np.empty(len(leaves.new), dtype=np.int64)
    owners[leaves.of_trajectory] = rank_N
    return loads_of(leaves, owners, num_ranks)


def _of_last_launch(step: Priced, closed_R: np.ndarray, has_any_R: np.ndarray) -> np.ndarray:
    """[R] int64, what a rank's last micro-batch of closed tokens costs more than its part of a full one."""
    full = 0.0 if step.max_tokens is None else closed_R / step.max_tokens
    missing = (np.maximum(np.ceil(full), 1) - full) * has_any_R
    return np.round(missing * step.cost.seconds_per_micro_batch / step.seconds_per_unit).astype(np.int64)
