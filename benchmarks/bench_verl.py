"""Tokens that verl's micro-batches compute: flat, with PrefixSharing's rule, and as trees.

Counted, not run: recorded trees are cut into micro-batches of rows, in order (the rows of one tree follow one another)
and shuffled over all trees (as dynamic batches balance them); the shuffled ones also as treewise cuts dynamic batches.
Then the same rows are dealt to ranks, as many to each, by their lengths (longest first, back and forth, for verl's
Karmarkar-Karp) and as treewise's trainer mode does; each rank's rows are one tree there.

    python benchmarks/bench_verl.py

    flat            every token of every row
    PrefixSharing   the add-on to verl of that name (github.com/versatile-ai/PrefixSharing, its detector of July 2026):
                    a row takes the keys and values of its longest common prefix with an earlier row of the
                    micro-batch, if it has 8 tokens or more, and computes the rest; `copied` counts keys of prefixes
                    that it concatenates for each row, in each layer
    treewise        tokens of the micro-batch's forest; keys are not copied
"""

from typing import Any

import numpy as np
from common import save
from tree_shapes import recorded

from treewise.integrations.verl_batches import rows_by_rank, runs_of_relatives
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import common_prefix
from treewise.tree.prefix_merge import in_order as prefix_order
from treewise.tree.trajectory import Trajectory

MIN_PREFIX = 8  # `min_prefix_len` in PrefixSharing's published configuration; 1 in its code gives the tree's tokens
SIZES = (4, 8, 16, 32)
MAX_TOKENS = 262_144  # of a dynamic micro-batch, in tree tokens
RANKS = (8, 32)
EVERY = 8  # of the recorded trees, so that the counts take a minute


def main() -> None:
    # Shapes have no tokens: a token is named by its position in its tree, and trees share nothing.
    forests = [forest for _, forest in recorded()][::EVERY]
    first = np.cumsum([0] + [forest.num_tokens for forest in forests])
    in_order = [path + start for forest, start in zip(forests, first, strict=False) for path in forest.paths]
    shuffled = [in_order[index] for index in np.random.default_rng(0).permutation(len(in_order))]
    rows: list[dict[str, Any]] = []
    for order, sequences in (("in order", in_order), ("shuffled", shuffled)):
        for size in SIZES:
            batches = [sequences[start : start + size] for start in range(0, len(sequences), size)]
            shared = [prefix_sharing(batch) for batch in batches]
            rows.append(
                {
                    "order": order, "rows_of_a_micro_batch": size, "rows": len(sequences),
                    "flat": sum(map(len, sequences)),
                    "prefix_sharing": sum(tokens for tokens, _ in shared), "copied": sum(keys for _, keys in shared),
                    "treewise": sum(tree_tokens(batch) for batch in batches),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    runs = runs_of_relatives(shuffled, MAX_TOKENS, workload)
    trees = [tree_tokens([shuffled[index] for index in run]) for run in runs]
    rows.append(
        {
            "order": "shuffled, cut by the line",
            "max_tokens": MAX_TOKENS,
            "batches": len(runs),
            "rows": len(shuffled),
            "treewise": sum(trees),
        }
    )
    print(rows[-1], flush=True)
    group = np.repeat(np.arange(len(forests)), [forest.num_trajectories for forest in forests])
    for num_ranks in RANKS:
        number = len(in_order) - len(in_order) % num_ranks  # verl pads the rest
        sequences = in_order[:number]
        by_length = np.argsort([-len(row) for row in sequences], kind="stable").reshape(-1, num_ranks)
        by_length[1::2] = by_length[1::2, ::-1]
        for dealt, parts in (
            ("by lengths", by_length.T.tolist()),
            ("by treewise", rows_by_rank(sequences, group[:number].tolist(), num_ranks, workload).rows),
        ):
            batches = [[sequences[index] for index in part] for part in parts]
            seconds = [tree_workload(batch) for batch in batches]
            rows.append(
                {
                    "order": f"dealt to ranks {dealt}", "ranks": num_ranks, "rows": number,
                    "flat": sum(map(len, sequences)), "treewise": sum(map(tree_tokens, batches)),
                    "cut_groups": sum(
                        len({rank for rank, part in enumerate(parts) for index in part if group[index] == each}) > 1
                        for each in set(group[:number].tolist())
                    ),
                    "slowest": max(seconds) * num_ranks / tree_workload(sequences),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    print(save("verl-tokens", rows))


def workload(lengths: np.ndarray) -> np.ndarray:
    """verl's prediction of the time of rows by their lengths."""
    return 24576.0 * lengths + lengths.astype(float) ** 2


def tree_workload(batch: list[np.ndarray]) -> float:
    """The same, of a forest: of each row, what it takes beyond the prefix that the one before it has computed."""
    order, shared = prefix_order(np.concatenate(batch), np.cumsum([0, *map(len, batch)]))
    lengths = np.array([len(batch[index]) for index in order])
    return float((workload(lengths) - workload(shared)).sum())


def prefix_sharing(batch: list[np.ndarray]) -> tuple[int, int]:
    """Tokens that are computed and keys that are copied under PrefixSharing's rule."""
    computed = copied = 0
    for index, row in enumerate(batch):
        longest = max((common_prefix(row, earlier) for earlier in batch[:index]), default=0)
        reused = longest if longest >= MIN_PREFIX else 0
        computed += len(row) - reused
        copied += reused
    return computed, copied


def tree_tokens(batch: list[np.ndarray]) -> int:
    """Tokens of the micro-batch's forest."""
    return Forest.from_trajectories([Trajectory(row.astype(np.int32)) for row in batch]).num_tokens


if __name__ == "__main__":
    main()
