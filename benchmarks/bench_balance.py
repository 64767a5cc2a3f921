"""How even ranks are, predicted: placements of real tree shapes, and mixed lengths under a memory limit.

Seconds are predicted by one cost model for all contestants: FLOPs of a 1.7B model at a fixed rate, so the results are
the same on every machine; only the time of placing is measured.

    python benchmarks/bench_balance.py

Placements of batches of real trees, every contestant's loads by the work of its ranks' own plans:

    round robin      trees in turn
    flat, longest first   whole trees by flat tokens, the largest to the rank with the least
    tree, longest first   the same by tree tokens
    contiguous cut   all trajectories in depth-first order, cut into runs at the least common capacity (as AReaL-DTA
                     balances data-parallel ranks)
    treewise         `balance.assign_ranks`

Mixed lengths: samples without shared prefixes, most short, few very long, on 8 ranks, with a limit of tokens that many
samples exceed, and with one that none does:

    sorted           samples by length, cut into padded batches
    packed           best fit decreasing without padding
    treewise         `balance.assign_ranks`, then each rank's plan; placed by seconds, and for ranks in step by tokens
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from common import save
from tree_shapes import forest_of, recorded

from treewise.distributed.lockstep import training_passes, turns_of
from treewise.distributed.placement import CostModel, Placement, assign_ranks, restrict_forest, work_of
from treewise.distributed.placement.cost_model import PAIR_FORWARD_FRACTION
from treewise.distributed.placement.leaf_costs import Leaves, costs_of
from treewise.planning.bin_packing import best_fit
from treewise.planning.partition import FORWARD_FRACTION
from treewise.planning.planner import plan
from treewise.planning.plans import BACKWARD, FORWARD, HOLD, Plan
from treewise.tree.declared import chain_nodes
from treewise.tree.forest import Forest

# 1.7B parameters, 28 layers of width 2048; forward and backward.
COST = CostModel.from_flops(flops_per_token=6 * 1.7e9, flops_per_pair=3.5 * 4 * 2048 * 28, flops_per_second=2e14)
MAX_TOKENS = 16_384
NUM_DRAWS = 5
MIXED_RANKS, MIXED_LIMIT, MIXED_SAMPLES = 8, 8_192, 256

Owners = np.ndarray  # [N] the rank of each trajectory, of all forests one after the other


def main() -> None:
    trees = [forest for _, forest in recorded()]
    short = [forest for forest in trees if forest.path_lengths.max() <= MAX_TOKENS]
    rows: list[dict[str, Any]] = []
    for name, pool in (("all", trees), (f"paths up to {MAX_TOKENS:,}", short)):
        for num_trees in (32, 128, 512):
            for num_ranks in (4, 8, 16, 32, 64):
                rows.append(placements(name, pool, num_trees, num_ranks))
                print_placements(rows[-1])
    rows.append(large_step(short))
    print(rows[-1])
    for seed in range(NUM_DRAWS):
        lengths = long_tailed(np.random.default_rng(seed))
        for limit in (MIXED_LIMIT, int(lengths.max())):
            rows.append(mixed_lengths(lengths, limit))
            print(rows[-1])
    print("written to", save("balance", rows))


# -- placements -------------------------------------------------------------------------------------------------------


def placements(name: str, pool: Sequence[Forest], num_trees: int, num_ranks: int) -> dict[str, Any]:
    """Medians and worst cases over several draws of a batch: slowest rank over the bound, and over the mean."""
    over_bound: dict[str, list[float]] = {}
    over_mean, in_step, is_path_bound = [], [], []
    for draw in range(NUM_DRAWS):
        rng = np.random.default_rng([num_trees, draw])
        chosen = [pool[index] for index in rng.choice(len(pool), num_trees, replace=False)]
        found = assign_ranks(chosen, num_ranks, COST, max_tokens=MAX_TOKENS)
        leaves = costs_of(chosen, COST, MAX_TOKENS).leaves()
        for contestant, owners in contestants(chosen, leaves, num_ranks, found).items():
            plans = [planned(chosen, owners, rank) for rank in range(num_ranks)]
            seconds = np.array([COST.seconds(work_of(each)) if each else 0.0 for each in plans])
            over_bound.setdefault(contestant, []).append(float(seconds.max() / found.bound_seconds))
            if contestant == "treewise":
                over_mean.append(float(seconds.max() / seconds.mean()))
                if num_ranks <= 16:
                    even = assign_ranks(chosen, num_ranks, COST, max_tokens=MAX_TOKENS, in_lockstep=True)
                    even_plans = [planned(chosen, even.rank_of_trajectory, rank) for rank in range(num_ranks)]
                    in_step.append(sum(max(turn) for turn in zip(*turns(even_plans), strict=True)) / seconds.max())
        is_path_bound.append(bool(leaves.path_cost.max() > leaves.before[-1] / num_ranks * 1.001))
    return {
        "part": "placement",
        "trees": name,
        "num_trees": num_trees,
        "num_ranks": num_ranks,
        "draws_bound_by_one_path": sum(is_path_bound),
        "slowest_over_bound": {key: {"median": median(value), "max": max(value)} for key, value in over_bound.items()},
        "slowest_over_mean": {"median": median(over_mean), "max": max(over_mean)},
        "slowest_over_mean_where_no_path_bounds": [
            value for value, is_bound in zip(over_mean, is_path_bound, strict=True) if not is_bound
        ],
        "in_step_over_slowest": {"median": float(median(in_step)), "max": float(max(in_step))} if in_step else None,
    }


def contestants(forests: Sequence[Forest], leaves: Leaves, num_ranks: int, found: Placement) -> dict[str, Owners]:
    counts = [forest.num_trajectories for forest in forests]
    flat = longest_first([forest.num_flat_tokens for forest in forests], num_ranks)
    tree = longest_first([forest.num_tokens for forest in forests], num_ranks)
    return {
        "round robin": np.repeat(np.arange(len(forests)) % num_ranks, counts),
        "flat, longest first": np.repeat(flat, counts),
        "tree, longest first": np.repeat(tree, counts),
        "contiguous cut": contiguous(leaves, num_ranks)[leaves.of_trajectory],
        "treewise": found.rank_of_trajectory,
    }


def longest_first(sizes: Sequence[int], num_ranks: int) -> np.ndarray:
    loads, owner = np.zeros(num_ranks), np.zeros(len(sizes), dtype=np.int64)
    for index in np.argsort(-np.array(sizes), kind="stable"):
        owner[index] = loads.argmin()
        loads[owner[index]] += sizes[index]
    return owner


def contiguous(leaves: Leaves, num_ranks: int) -> np.ndarray:
    """[L] the rank of each leaf, at the least capacity at which greedy runs over all leaves in order do."""
    low, high = int(leaves.path_cost.max()), int(leaves.before[-1]) + int(leaves.above.sum())

    def cut(capacity: int) -> np.ndarray | None:
        owners, begin = np.zeros(len(leaves.new), dtype=np.int64), 0
        for rank in range(num_ranks):
            reach = leaves.before[begin] + capacity - leaves.above[begin]
            end = int(np.searchsorted(leaves.before, reach, side="right")) - 1
            owners[begin:end] = rank
            begin = end
            if begin == len(leaves.new):
                return owners
        return None

    while high - low > max(1, low // 10_000):
        middle = (low + high) // 2
        low, high = (low, middle) if cut(middle) is not None else (middle, high)
    owners = cut(high)
    assert owners is not None
    return owners


def planned(forests: Sequence[Forest], owners: Owners, rank: int, max_tokens: int | None = MAX_TOKENS) -> Plan | None:
    """One rank's plan."""
    bounds = np.cumsum([forest.num_trajectories for forest in forests])[:-1]
    parts = [
        restrict_forest(forest, np.flatnonzero(own == rank))
        for forest, own in zip(forests, np.split(owners, bounds), strict=True)
        if (own == rank).any()
    ]
    return plan(parts, max_tokens) if parts else None


def print_placements(row: dict[str, Any]) -> None:
    figures = ", ".join(f"{key} {value['median']:.3f}" for key, value in row["slowest_over_bound"].items())
    print(
        f"{row['trees']}: {row['num_trees']} trees, {row['num_ranks']} ranks, slowest / bound: {figures} "
        f"(worst {row['slowest_over_bound']['treewise']['max']:.3f}); / mean {row['slowest_over_mean']['median']:.3f}; "
        f"in step / slowest {row['in_step_over_slowest']}",
        flush=True,
    )


def large_step(pool: Sequence[Forest]) -> dict[str, Any]:
    """10,000 trees over 1,024 ranks, which a rank must place while it computes a step."""
    rng = np.random.default_rng(0)
    chosen = [pool[index].segments for index in rng.choice(len(pool), 10_000)]
    seconds = []
    for _ in range(3):
        started = time.process_time()  # it is one thread, beside others in a real run
        found = assign_ranks(chosen, 1024, COST, max_tokens=MAX_TOKENS)
        seconds.append(time.process_time() - started)
    return {
        "part": "large step",
        "num_trees": 10_000,
        "num_ranks": 1024,
        "cpu_seconds_of_placing": median(seconds),
        "slowest_over_bound": float(found.seconds.max() / found.bound_seconds),
        "slowest_over_mean": found.imbalance,
    }


# -- mixed lengths ----------------------------------------------------------------------------------------------------


def mixed_lengths(lengths: np.ndarray, limit: int) -> dict[str, Any]:
    """One step of samples of which nearly all are short; what each way of batching costs and how much it holds.

    Under a limit below the longest sample, sorted and packed batches break it: they have no way to cut a sample.
    """
    by_rank = {
        "sorted": dealt(sorted_batches(lengths, limit)),
        "packed": dealt([lengths[items].tolist() for items in packed(lengths, limit)]),
    }
    result = {name: flat_figures(batches, limit, is_padded=name == "sorted") for name, batches in by_rank.items()}
    return {
        "part": "mixed lengths",
        "limit": limit,
        "longest": int(lengths.max()),
        "share_below_4096": float((lengths < 4096).mean()),
        "tokens": int(lengths.sum()),
        **result,
        "treewise": tree_figures(lengths, limit, in_lockstep=False),
        "treewise in step": tree_figures(lengths, limit, in_lockstep=True),
    }


def long_tailed(rng: np.random.Generator) -> np.ndarray:
    """Lengths like those of chat data: a log-normal body, and one sample in fifty from a Pareto tail up to 131,072."""
    body = rng.lognormal(np.log(500), 0.9, MIXED_SAMPLES)
    tail = 4096 * (1 + rng.pareto(0.8, MIXED_SAMPLES))
    lengths = np.where(rng.random(MIXED_SAMPLES) < 0.02, tail, body)
    return np.clip(lengths, 16, 131_072).astype(np.int64)


def sorted_batches(lengths: np.ndarray, limit: int) -> list[list[int]]:
    """Samples by length, as many a batch as fit when padded to the longest; one that does not fit is alone."""
    batches: list[list[int]] = []
    for length in np.sort(lengths)[::-1].tolist():
        if batches and (len(batches[-1]) + 1) * batches[-1][0] <= limit:
            batches[-1].append(length)
        else:
            batches.append([length])
    return batches


def packed(lengths: np.ndarray, limit: int) -> list[list[int]]:
    """Best fit decreasing; a sample beyond the limit is alone."""
    fits = np.flatnonzero(lengths <= limit)
    bins = best_fit(lengths[fits].tolist(), limit)
    alone = [[int(item)] for item in np.flatnonzero(lengths > limit)]
    return alone + [fits[items].tolist() for items in bins]


def dealt(batches: list[list[int]]) -> list[list[list[int]]]:
    """Batches to ranks in turn, the largest first, so that those that run side by side are alike."""
    ordered = sorted(batches, key=lambda batch: -sum(length * length for length in batch))
    return [ordered[rank::MIXED_RANKS] for rank in range(MIXED_RANKS)]


def flat_figures(by_rank: list[list[list[int]]], limit: int, is_padded: bool) -> dict[str, float]:
    def computed(batch: list[int]) -> list[int]:
        return [max(batch)] * len(batch) if is_padded else batch

    def seconds(batch: list[int]) -> float:
        pairs = sum(length * (length + 1) / 2 for length in computed(batch))
        return seconds_of(sum(computed(batch)), pairs) + COST.seconds_per_micro_batch

    own = [[seconds(batch) for batch in batches] for batches in by_rank]
    tokens = [sum(computed(batch)) for batches in by_rank for batch in batches]
    return figures(own, tokens, sum(tokens), limit)


def tree_figures(lengths: np.ndarray, limit: int, in_step: bool) -> dict[str, float]:
    """The same for plans: each step of the common sequence takes as long as its slowest rank."""
    samples = [forest_of(chain_nodes(np.array([-1]), np.array([n]), np.array([0]), np.array([0]))) for n in lengths]
    found = assign_ranks(samples, MIXED_RANKS, COST, max_tokens=limit, in_lockstep=in_step)
    plans = []
    for rank in range(MIXED_RANKS):
        share = [forest for forest, own in zip(samples, found.rank_of_trajectory, strict=True) if own == rank]
        plans.append(plan(share, limit) if share else None)
    seconds = turns(plans)
    live = [tokens for each in plans if each for _, tokens in each.timeline]
    computed = sum(each.num_computed_tokens for each in plans if each)
    return figures(seconds, live, computed, limit)


def turns(plans: Sequence[Plan | None]) -> list[list[float]]:
    """Seconds of each rank at each of the common turns."""
    everybody = [training_passes(each) for each in plans]
    return [
        [0.0 if turn.own_step is None else step_seconds(each, turn.own_step) for turn in own_turns]
        for each, own_turns in zip(plans, (turns_of(own, everybody) for own in everybody), strict=True)
    ]


def step_seconds(made: Plan | None, number: int) -> float:
    assert made is not None
    step = made.schedule[number]
    batch = made.micro_batches[step.micro_batch]
    pairs = float((made.forest.depth[batch.positions()].astype(np.int64) + 1).sum())
    forward = seconds_of(FORWARD_FRACTION * batch.num_tokens, PAIR_FORWARD_FRACTION * pairs)
    whole = seconds_of(batch.num_tokens, pairs)
    if step.action in (FORWARD, HOLD):
        return forward + COST.seconds_per_micro_batch
    return whole - forward if step.action == BACKWARD else whole + COST.seconds_per_micro_batch


def seconds_of(tokens: float, pairs: float) -> float:
    return COST.seconds_per_token * tokens + COST.seconds_per_pair * pairs


def figures(seconds: list[list[float]], live: Sequence[int], computed: int, limit: int) -> dict[str, float]:
    """Seconds of a step in lockstep (each step as long as its slowest rank) and of the slowest rank alone."""
    longest = max(map(len, seconds))
    padded = np.array([own + [0.0] * (longest - len(own)) for own in seconds])
    return {
        "seconds_in_lockstep": float(padded.max(axis=0).sum()),
        "seconds_of_slowest": float(padded.sum(axis=1).max()),
        "most_live_tokens": int(max(live)),
        "steps_over_limit": sum(tokens > limit for tokens in live),
        "computed_tokens": int(computed),
    }


if __name__ == "__main__":
    main()
