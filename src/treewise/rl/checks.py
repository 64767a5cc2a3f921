"""Likely mistakes of an update on rollouts: rewards under another name, positions trained twice, a wide gap."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from treewise.errors import num
from treewise.tree.prefix_merge import common_prefix
from treewise.tree.trajectory import Trajectory, number_rollouts

MAX_GAP = 1.02  # mean of exp(|log-prob of the policy - of the sampler|)
REWARD_NAMES = ("reward", "score", "return", "success", "correct", "passed", "resolved", "solved", "accuracy", "grade")


def reward_like(record: Mapping[str, Any]) -> list[str]:
    """Fields of a record that could be its reward: numbers or truth values whose name resembles one."""
    return [
        str(name)
        for name, value in record.items()
        if isinstance(value, bool | int | float) and any(word in str(name).lower() for word in REWARD_NAMES)
    ]


def trained_twice(trees: Iterable[Sequence[Trajectory]]) -> int:
    """Positions that several rows of one rollout train; with `per_trajectory` they count once for each of these."""
    total = 0
    for tree in trees:
        rows: dict[int, list[Trajectory]] = defaultdict(list)
        for number, item in zip(number_rollouts(tree), tree, strict=True):
            rows[int(number)].append(item)
        total += sum(_repeated(members) for members in rows.values() if len(members) > 1)
    return total


def _repeated(rows: Sequence[Trajectory]) -> int:
    """Trained positions of a row that an earlier row holds, trained, behind the same tokens."""
    count = 0
    for index, row in enumerate(rows):
        shared = np.zeros(len(row.token_ids), dtype=bool)
        for other in rows[:index]:
            same = common_prefix(row.token_ids, other.token_ids)
            shared[:same] |= (row.loss_weights[:same] > 0) & (other.loss_weights[:same] > 0)
        count += int(shared.sum())
    return count


def warnings_of(trees: Sequence[Sequence[Trajectory]], weighting: str) -> list[str]:
    """Warnings about the rows, printed before the first step."""
    repeated = trained_twice(trees) if weighting == "per_trajectory" else 0
    if not repeated:
        return []
    return [
        f"rows of one rollout train {num(repeated, 'position')} more than once, and weighting is per_trajectory, which "
        "counts each row; with weighting=per_rollout every position of a rollout counts once."
    ]


def gap_warning(gap: float, limit: float = MAX_GAP) -> str | None:
    """A warning where the policy's log-probs are farther from the sampler's than a limit."""
    if not gap > limit:
        return None
    return (
        f"logprob_gap is {gap:,.4g} (1: none; limit {limit:g}): the policy gives the sampled tokens other "
        "probabilities than the sampler did. Check that model, dtype, temperature, chat template and tokens are the "
        "sampler's, or correct for the difference: sampler_correction=truncate. First tokens that lcr drew from "
        "candidates (num_candidates) are off policy by design, and count."
    )
