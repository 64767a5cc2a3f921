"""How even ranks are with few trees each, predicted: 24 groups of samples on 16 ranks, in many draws.

A group is a prompt of 200 to 2,000 tokens and samples of 100 to 3,000, lengths drawn evenly. Loads are predicted by the
cost model of bench_balance.py, so the results are the same on every machine.

    python benchmarks/bench_few_groups.py
"""

from typing import Any

import numpy as np
from bench_balance import COST, longest_first, planned
from common import save
from tree_shapes import forest_of

from treewise.distributed.placement import assign_ranks, work_of
from treewise.tree.declared import chain_nodes
from treewise.tree.forest import Forest

NUM_GROUPS, NUM_RANKS = 24, 16
# Samples of a group, budget, draws.
CASES = (((2, 4), None, 40), ((2, 4), 8192, 40), ((2, 4), 2048, 40))
PROMPT, SAMPLE = (200, 2000), (100, 3000)  # tokens


def main() -> None:
    rows = []
    for case in CASES:
        rows.append(draws(*case))
        print(rows[-1], flush=True)
    print("written to", save("few-groups", rows))


def draws(num_samples: tuple[int, int], max_tokens: int | None, num_draws: int) -> dict[str, Any]:
    """Least, median and greatest ratio over all draws."""
    found = [
        one_draw(np.random.default_rng([*num_samples, draw]), num_samples, max_tokens) for draw in range(num_draws)
    ]
    ratios = {
        name: [round(float(np.quantile([each[name] for each in found], part)), 4) for part in (0, 0.5, 1)]
        for name in found[0]
    }
    return {"samples": num_samples, "max_tokens": max_tokens, "num_draws": num_draws, **ratios}


def one_draw(rng: np.random.Generator, num_samples: tuple[int, int], max_tokens: int | None) -> dict[str, float]:
    groups = [group(rng, num_samples) for _ in range(NUM_GROUPS)]
    placement = assign_ranks(groups, NUM_RANKS, COST, max_tokens=max_tokens)
    seconds = loads(groups, placement.rank_of_trajectory, max_tokens)
    owners = longest_first([forest.num_tokens for forest in groups], NUM_RANKS)
    whole = loads(groups, np.repeat(owners, [forest.num_trajectories for forest in groups]), max_tokens)
    return {
        "slowest_over_mean": seconds.max() / seconds.mean(),
        "slowest_over_bound": seconds.max() / placement.bound_seconds,
        "longest_first_over_treewise": whole.max() / seconds.max(),
        "prediction_off_by": float(np.abs(placement.seconds / seconds - 1).max()),
    }


def group(rng: np.random.Generator, num_samples: tuple[int, int]) -> Forest:
    """A prompt and its samples."""
    count = int(rng.integers(num_samples[0], num_samples[1] + 1))
    lengths = np.array([rng.integers(*PROMPT), *rng.integers(*SAMPLE, size=count)])
    parents = np.array([-1, *[0] * count])
    return forest_of(chain_nodes(parents, lengths, np.arange(1, count + 1), np.cumsum(lengths) - lengths))


def loads(groups: list[Forest], owners: np.ndarray, max_tokens: int | None) -> np.ndarray:
    """[ranks] predicted seconds of each rank's own plan."""
    plans = [planned(groups, owners, rank, max_tokens) for rank in range(NUM_RANKS)]
    return np.array([COST.seconds(work_of(each)) if each else 1e-9 for each in plans])


if __name__ == "__main__":
    main()
