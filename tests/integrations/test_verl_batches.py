"""Ranks and micro-batches of relatives: every row once, no more tree tokens than fit, time balanced."""

import numpy as np
import pytest

from treewise.errors import ConfigError
from treewise.integrations.verl_batches import rows_by_rank, runs_of_relatives
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


def workload(lengths):
    return 10.0 * lengths + lengths**2


def tree_tokens(rows):
    return Forest.from_trajectories([Trajectory(row) for row in rows]).num_tokens


def rows_of_groups(rng, num_groups, num_answers):
    """Rows in random order, and the group of each; num_answers: of each group."""
    rows, groups = [], np.repeat(np.arange(num_groups), num_answers)
    for group, number in enumerate(num_answers):
        prompt = np.append(60 + group, rng.integers(3, 60, rng.integers(9, 39)))
        rows += [np.concatenate([prompt, rng.integers(3, 60, 6)]) for _ in range(number)]
    order = rng.permutation(len(rows))
    return [rows[index] for index in order], groups[order].tolist()


def rows_of(rng, num_groups, num_answers):
    return rows_of_groups(rng, num_groups, [num_answers] * num_groups)[0]


def parts_of(found, num_mini_batches):
    """Rows of each part, [ranks][mini-batches]."""
    return [np.split(np.array(rows), num_mini_batches) for rows in found.rows]


def seconds_of(rows, part):
    """Predicted time of some rows on a tree, token by token; a last token of its own counts, as in `rows_by_rank`."""
    seen = {tuple(rows[index][:end]) for index in part for end in range(1, len(rows[index]) + 1)}
    return sum(workload(len(path)) - workload(len(path) - 1) for path in seen) + sum(
        workload(len(rows[index]) + 1) - workload(len(rows[index])) for index in part
    )


@pytest.mark.parametrize(("num_ranks", "num_mini_batches"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_groups_of_one_size_are_whole_and_ranks_even(seed, num_ranks, num_mini_batches):
    rows, groups = rows_of_groups(np.random.default_rng(seed), 24, [4] * 24)
    found = rows_by_rank(rows, groups, num_ranks, workload, num_mini_batches)
    assert sorted(index for part in found.rows for index in part) == list(range(96))
    parts = parts_of(found, num_mini_batches)
    of_group = [{groups[index] for index in part} for each in parts for part in each]
    assert sum(map(len, of_group)) == len(set.union(*of_group)) == 24
    assert found.num_cut == 0
    seconds = np.array([[seconds_of(rows, part) for part in each] for each in parts])
    assert found.imbalance == pytest.approx(seconds.max(0).sum() / seconds.sum() * num_ranks, rel=1e-6)
    assert found.imbalance < 1.1


def test_groups_of_many_sizes_make_ranks_of_one():
    rng = np.random.default_rng(0)
    sizes = [1, 7, 3, 5, 2, 6, 4, 4]
    rows, groups = rows_of_groups(rng, 8, sizes)
    found = rows_by_rank(rows, groups, 4, workload)
    assert [len(set(part)) for part in found.rows] == [8] * 4
    assert found.num_cut == sum(len([part for part in found.rows if group in {groups[i] for i in part}]) > 1
                                for group in range(8))  # fmt: skip
    assert found.imbalance < 1.1


def test_a_group_is_cut_where_the_slowest_rank_gains_by_it():
    """Two groups for two ranks: of one time they stay whole; a group that is much longer is shared out."""
    rng = np.random.default_rng(0)
    short, long = ([np.append([3 + group], rng.integers(9, 60, length)) for _ in range(4)]
                   for group, length in ((0, 10), (1, 60)))  # fmt: skip
    assert rows_by_rank(short + long, [0] * 4 + [1] * 4, 2, workload).num_cut == 2
    prompt = rng.integers(3, 60, 500)
    near = [np.append(prompt, row) for row in long]  # cut, it would take the prompt twice
    assert rows_by_rank([*near, *near], [0] * 4 + [1] * 4, 2, workload).num_cut == 0


def test_rows_that_ranks_cannot_share_evenly_are_an_error():
    with pytest.raises(ConfigError, match="3 rows do not go to 2 ranks in 1 mini-batches"):
        rows_by_rank([np.arange(4)] * 3, [0] * 3, 2, workload)


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
