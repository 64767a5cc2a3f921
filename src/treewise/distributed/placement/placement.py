"""Which rank trains which trajectories of a step.

Every trajectory goes to exactly one rank. A tree may be cut between ranks; each of them then computes the path above
the cut. `split` makes the forests of each rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from treewise.base.arrays import Bools, Floats, Ints
from treewise.distributed.placement.cost_model import CostModel, work_of
from treewise.distributed.placement.leaf_costs import Leaves, StepCosts, costs_of, slice_of
from treewise.distributed.placement.search import (
    GOOD_ENOUGH,
    best_owners,
    is_even,
    loads_of,
    longest_first,
)
from treewise.errors import DataError, PlanError, check_choice
from treewise.planning.planner import plan
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import Segments, restrict

# -- A lower bound of the slowest rank's cost, by which placements are measured ---------------------------------------


def least_load(step: StepCosts, leaves: Leaves, num_ranks: int) -> int:
    """A lower bound of the slowest rank's cost, in units: the mean with nothing computed twice, or the most expensive
    leaf by itself, whose tokens above a path that exceeds the budget are open on any rank.

    leaves: of this step, joined where no cut is allowed, without the extra cost of open tokens.
    """
    alone = restrict(step.segments, np.flatnonzero(leaves.of_trajectory == int(leaves.path_cost.argmax())))
    most = int(step.once[np.searchsorted(step.segments.start, alone.source)].sum())
    if step.max_tokens is not None:
        length = alone.lengths
        above: list[int] = alone.parent.tolist()
        deepest: list[int] = (alone.depth + length).tolist()
        for segment in range(len(above) - 1, 0, -1):
            if above[segment] >= 0:
                deepest[above[segment]] = max(deepest[above[segment]], deepest[segment])
        num_open = np.clip(np.array(deepest) - step.max_tokens - alone.depth, 0, length)
        most += int(step.units_of_second_forward(num_open, alone.depth).sum())
    return max(most, -(-int(step.once.sum()) // num_ranks))


# -- Open tokens cost less where trees are cut, and differently for every cut -----------------------------------------


@dataclass(frozen=True, slots=True)
class PartCosts:
    """loads: [R] int64, cost of each rank. recompute: [S] int64, extra cost of open tokens, the mean over parts."""

    loads: Ints
    recompute: Ints


def part_costs(step: StepCosts, rank_N: Ints, num_ranks: int) -> PartCosts:
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
    # Of closed tokens a rank's last micro-batch is not full.
    full_R = np.zeros(num_ranks) if step.max_tokens is None else tokens_R / step.max_tokens
    missing_R = (np.maximum(np.ceil(full_R), 1) - full_R) * (loads > 0)
    launches_R = np.round(missing_R * step.cost.seconds_per_micro_batch / step.seconds_per_unit).astype(np.int64)
    return PartCosts(loads + launches_R, recompute)


def _loads(step: StepCosts, units: Ints, rank_N: Ints, num_ranks: int) -> Ints:
    leaves = step.leaves(units)
    owners = np.empty(len(leaves.new), dtype=np.int64)
    owners[leaves.of_trajectory] = rank_N
    return loads_of(leaves, owners, num_ranks)


# -- Refines placements of small steps with real plans ----------------------------------------------------------------


NUM_PLANNED_LEAVES = 20
MAX_PLANS = 400
LeafSet = frozenset[int]


def refine(step: StepCosts, leaf_N: Ints, owners: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """The rank of each leaf ([L] int64) after the search, and the costs of the ranks' plans ([ranks] int64), in units.

    leaf_N: [N] int64, the leaf of each trajectory. owners: [L] int64, where the search starts.
    """

    @cache
    def cost(leaves: LeafSet) -> int:
        """Of a rank with these leaves."""
        if not leaves:
            return 0
        part = restrict(step.segments, np.flatnonzero(np.isin(leaf_N, list(leaves))))
        rank_plan = plan(Forest(part, np.zeros(part.num_tokens, dtype=np.int32), None, {}), step.max_tokens)
        return round(step.cost.seconds(work_of(rank_plan)) / step.seconds_per_unit)

    parts = [frozenset(np.flatnonzero(owners == rank).tolist()) for rank in range(num_ranks)]
    is_better = True
    while is_better:
        is_better = False
        slowest = max(range(num_ranks), key=lambda rank: cost(parts[rank]))
        for partner, of_slowest, of_partner in _moves(parts, slowest):
            if cost.cache_info().currsize >= MAX_PLANS:
                break
            if max(cost(of_slowest), cost(of_partner)) < cost(parts[slowest]):
                parts[slowest], parts[partner] = of_slowest, of_partner
                is_better = True
                break
    refined = np.empty_like(owners)
    for rank, leaves in enumerate(parts):
        refined[list(leaves)] = rank
    return refined, np.array([cost(leaves) for leaves in parts], dtype=np.int64)


def _moves(parts: list[LeafSet], slowest: int) -> Iterator[tuple[int, LeafSet, LeafSet]]:
    """A partner, and new leaves of the slowest rank and of the partner: all transfers of one leaf, then all swaps."""
    own, others = sorted(parts[slowest]), [rank for rank in range(len(parts)) if rank != slowest]
    for partner, leaf in product(others, own):
        yield partner, parts[slowest] - {leaf}, parts[partner] | {leaf}
    for partner, leaf in product(others, own):
        for back in sorted(parts[partner]):
            yield partner, parts[slowest] - {leaf} | {back}, parts[partner] - {back} | {leaf}


SPLITS = ("rollouts", "trajectories", "never")
# Successive placements, each with the cost that open tokens have in the parts of the one before.
NUM_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of every trajectory.

    rank_of_trajectory: [N] int64, trajectories of all forests in order. seconds: [ranks] float64, predicted.
    bound_seconds: a lower bound of the slowest rank's time in any placement (`least_load`).
    """

    rank_of_trajectory: Ints
    seconds: Floats
    bound_seconds: float

    @property
    def imbalance(self) -> float:
        """Slowest rank over the mean of all; 1 is perfect."""
        return float(self.seconds.max() / self.seconds.mean())


def assign_ranks(
    shapes: Sequence[Forest | Segments],
    num_ranks: int,
    cost: CostModel,
    *,
    max_tokens: int | None = None,
    split: str = "rollouts",
    in_lockstep: bool = False,
    in_equal_number: bool = False,
) -> Placement:
    """Assigns a step's trajectories to ranks so that the predicted time of the slowest rank is small.

    Deterministic: the same shapes and costs give the same placement on every machine. A rank may get nothing.

    shapes: the forests of a step, or only their segments, each of whose trajectories then counts as a rollout.
    split: where trees may be cut. `rollouts`: between trajectories, but all rows of a rollout go to one rank, which
        suits every objective that is a sum over rollouts. `trajectories`: anywhere between trajectories. `never`:
        trees stay whole, for losses that compare the trajectories of a tree.
    in_lockstep: ranks wait for one another at every pass, as they do with sharded parameters. Tokens are then balanced
        instead of seconds, because a step takes as many turns as the rank with the most micro-batches.
    in_equal_number: ranks get as many trajectories each, whatever that takes; seconds are balanced among such
        placements. Numbers differ where leaves of several trajectories, or what `split` keeps whole, leave no other.

    Raises:
        PlanError: no rank, a budget below one token, or an unknown `split`.
        DataError: no forest.
    """
    check_choice("split", split, SPLITS, PlanError)
    if num_ranks < 1:
        raise PlanError(f"num_ranks is {num_ranks}; a step needs at least 1.")
    if max_tokens is not None and max_tokens < 1:
        raise PlanError(f"max_tokens is {max_tokens}; a micro-batch holds at least 1 token.")
    if not shapes:
        raise DataError("no forest to place; give at least one.")
    step = costs_of(shapes, cost, max_tokens)
    leaves = step.leaves()
    may_cut = np.ones(len(leaves.new), dtype=bool)
    if split != "trajectories":
        may_cut = _between_rollouts(shapes, leaves) if split == "rollouts" else leaves.starts_tree()
    bound = least_load(step, step.leaves(step.once).joined(may_cut), num_ranks)
    if in_lockstep and cost.seconds_per_token > 0:
        even = costs_of(shapes, replace(cost, seconds_per_pair=0.0), max_tokens)
        least = least_load(even, even.leaves(even.once).joined(may_cut), num_ranks)
        rank_N, _ = _assign(even, may_cut, num_ranks, least, in_equal_number)
        loads = part_costs(step, rank_N, num_ranks).loads
    else:
        rank_N, loads = _assign(step, may_cut, num_ranks, bound, in_equal_number)
    return Placement(
        rank_of_trajectory=rank_N,
        seconds=loads * step.seconds_per_unit,
        bound_seconds=bound * step.seconds_per_unit,
    )


def _assign(step: StepCosts, may_cut: Bools, num_ranks: int, bound: int, in_equal_number: bool) -> tuple[Ints, Ints]:
    """[N] int64, the rank of each trajectory, and [ranks] int64, the cost of each rank in units."""
    leaves, at_most = step.leaves().joined(may_cut), bound + int(bound * GOOD_ENOUGH)
    if num_ranks == 1:
        rank_N = np.zeros(len(leaves.of_trajectory), dtype=np.int64)
        return rank_N, part_costs(step, rank_N, 1).loads
    unit = int(leaves.before[-1]) + 1 if in_equal_number else 0
    share = unit * len(leaves.of_trajectory) // num_ranks
    owners = _in_equal_number(leaves.counted(unit), num_ranks) if in_equal_number else None
    extra_load = np.full(num_ranks, -share, dtype=np.int64)
    best, loads = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for _ in range(NUM_ROUNDS):
        owners = best_owners(leaves.counted(unit), extra_load, at_most, owners)
        costs = part_costs(step, owners[leaves.of_trajectory], num_ranks)
        if not len(loads) or costs.loads.max() < loads.max():
            best, loads = owners, costs.loads
        if (costs.recompute == step.recompute).all() or loads.max() <= at_most or is_even(loads):
            break
        leaves = step.leaves(step.once + costs.recompute).joined(may_cut)
        # Leaves have the mean cost of open tokens over ranks; each rank's difference from that stays constant.
        extra_load = costs.loads - loads_of(leaves, owners, num_ranks) - share
    if step.max_tokens is not None and len(best) <= NUM_PLANNED_LEAVES and not in_equal_number:
        best, loads = refine(step, leaves.of_trajectory, best, num_ranks)
    return best[leaves.of_trajectory], loads


def _in_equal_number(counted: Leaves, num_ranks: int) -> Ints:
    """[L] int64, owners to start from: whole trees where that makes equal numbers, or runs of equal numbers."""
    number = np.bincount(counted.of_trajectory, minlength=len(counted.new))
    owners = longest_first(counted, num_ranks)
    if len(set(np.bincount(owners, number, num_ranks).tolist())) == 1:
        return owners
    before = np.cumsum(number) - number
    return before * num_ranks // len(counted.of_trajectory)


def _between_rollouts(shapes: Sequence[Forest | Segments], leaves: Leaves) -> Bools:
    """[L] bool, the leaves before which no rollout has begun and not ended."""
    rollout, num_rollouts = [], 0
    for shape in shapes:
        if isinstance(shape, Forest):
            rollout_n = shape.rollout_of_trajectory
        else:
            rollout_n = np.arange(len(shape.end_segment))
        rollout.append(rollout_n + num_rollouts)
        num_rollouts += int(rollout_n.max()) + 1
    rollout_N = np.concatenate(rollout)
    first = np.full(num_rollouts, len(leaves.new))
    last = np.zeros(num_rollouts, dtype=np.int64)
    np.minimum.at(first, rollout_N, leaves.of_trajectory)
    np.maximum.at(last, rollout_N, leaves.of_trajectory)
    change = np.zeros(len(leaves.new) + 1, dtype=np.int64)
    np.add.at(change, first + 1, 1)
    np.subtract.at(change, last + 1, 1)
    return np.cumsum(change)[:-1] == 0
