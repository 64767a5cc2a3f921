"""Micro-batches of relatives: every row once, no more tree tokens than fit, time balanced."""

import numpy as np
import pytest

from treewise.errors import ConfigError
from treewise.integrations.verl_batches import runs_of_relatives
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


def workload(lengths):
    return 10.0 * lengths + lengths**2


def tree_tokens(rows):
    return Forest.from_trajectories([Trajectory(row) for row in rows]).num_tokens


def rows_of(rng, num_groups, num_answers):
    groups = [(rng.integers(3, 60, rng.integers(10, 40)), rng.integers(3, 60, (num_answers, 6)))
              for _ in range(num_groups)]  # fmt: skip
    rows = [np.concatenate([prompt, answer]) for prompt, answers in groups for answer in answers]
    return [rows[index] for index in rng.permutation(len(rows))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_batches", [1, 7])
def test_relatives_stay_together_within_the_budget(seed, num_batches):
    rows = rows_of(np.random.default_rng(seed), 6, 8)
    runs = runs_of_relatives(rows, 120, workload, num_batches=num_batches)
    assert sorted(index for run in runs for index in run) == list(range(len(rows)))
    sizes = [tree_tokens([rows[index] for index in run]) for run in runs]
    assert max(sizes) <= 120
    assert len(runs) >= num_batches
    whole = tree_tokens(rows)
    assert sum(sizes) <= whole + len(runs) * 46  # a run begins with a whole row
    assert sum(sizes) < sum(map(len, rows)) / 2


def test_times_are_those_of_the_tree():
    prompt = np.arange(100)
    rows = [np.append(prompt, [200, answer]) for answer in range(8)] + [np.arange(1000, 1050), np.arange(2000, 2050)]
    runs = runs_of_relatives(rows, 200, workload)
    assert sorted(map(sorted, runs)) == [list(range(8)), [8, 9]]
    assert [len(run) for run in runs_of_relatives(rows[:8], 200, workload, num_batches=8)] == [1] * 8


def test_rows_that_share_little_count_flat():
    rows = [np.append([7], np.full(40, number)) for number in range(4)]  # 164 flat tokens, 161 of the tree
    assert len(runs_of_relatives(rows, 161, workload, min_ratio=1.1)) == 2
    assert len(runs_of_relatives(rows, 161, workload)) == 1
    with pytest.raises(ConfigError, match="4 rows of up to 41 tokens do not make 1 micro-batches of up to 40"):
        runs_of_relatives(rows, 40, workload)
