"""Where branches come back to one another: planted differences are found exactly, and nothing is claimed falsely."""

import difflib
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.report.analysis import alignment
from treewise.report.analysis.alignment import WINDOW, chain_heads, realigned_forks, window_hashes
from treewise.testing.strategies import forests
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

ALL = 10**6
DRIFT = Path(__file__).parents[2] / "data" / "fixtures" / "retokenization_drift.json.gz"


def forest_of(*sequences: list[int]) -> Forest:
    return Forest.from_trajectories([Trajectory(each) for each in sequences])


@given(
    common=st.lists(st.integers(WINDOW, 40), min_size=1, max_size=4),
    differing=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=4, max_size=4),
    shared=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_planted_common_runs_are_found_exactly(
    common: list[int], differing: list[tuple[int, int]], shared: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    fresh = iter(rng.permutation(100_000).tolist())  # no token twice, so nothing is common by chance
    left = right = [next(fresh) for _ in range(shared)]
    for length, (first, second) in zip(common, differing, strict=False):
        run = [next(fresh) for _ in range(length)]
        left = left + [next(fresh) for _ in range(first)] + run
        right = right + [next(fresh) for _ in range(second)] + run
    forest = forest_of(left, [*right, next(fresh)])
    (fork,), skipped = realigned_forks(forest.segments, forest.token_ids, ALL)
    assert fork.runs[:, 2].tolist() == common
    assert fork.num_common_tokens == sum(common)
    assert skipped == 0


@given(forest=forests(vocab_size=2, max_new_tokens=60))
def test_every_run_is_common_and_in_order(forest: Forest) -> None:
    forks, _ = realigned_forks(forest.segments, forest.token_ids, ALL)
    heads = forest.segments.start[chain_heads(forest.segments)]
    for fork in forks:
        assert fork.first_light in heads
        for light, heavy, length in fork.runs.tolist():
            assert length >= WINDOW
            same = forest.token_ids[light : light + length] == forest.token_ids[heavy : heavy + length]
            assert same.all()
        for column in (0, 1):
            ends = fork.runs[:, column] + fork.runs[:, 2]
            assert (fork.runs[1:, column] >= ends[:-1]).all()
        # Neither side leaves its own chain.
        for column, first in ((0, fork.first_light), (1, fork.first_heavy)):
            stop = np.append(heads[heads > first], forest.num_tokens)[0]
            assert fork.runs[0, column] >= first
            assert fork.runs[-1, column] + fork.runs[-1, 2] <= stop


@given(forest=forests(vocab_size=2))
def test_chains_are_paths_that_hold_every_token_once(forest: Forest) -> None:
    heads = forest.segments.start[chain_heads(forest.segments)]
    assert heads[0] == 0
    inside = np.setdiff1d(np.arange(forest.num_tokens), heads)
    assert (forest.parent[inside] == inside - 1).all()


@given(ids=st.lists(st.integers(0, 2), min_size=WINDOW, max_size=120))
def test_equal_windows_and_only_those_have_equal_hashes(ids: list[int]) -> None:
    hashes = window_hashes(np.array(ids, dtype=np.int32))
    windows = [tuple(ids[i : i + WINDOW]) for i in range(len(ids) - WINDOW + 1)]
    for i, left in enumerate(windows):
        for j, right in enumerate(windows):
            assert (hashes[i] == hashes[j]) == (left == right)


def test_a_run_shorter_than_a_window_does_not_count() -> None:
    short, enough = list(range(100, 100 + WINDOW - 1)), list(range(100, 100 + WINDOW))
    for run, expected in ((short, 0), (enough, 1)):
        forest = forest_of([1, 2, *run], [1, 3, *run, 4])
        assert len(realigned_forks(forest.segments, forest.token_ids, ALL)[0]) == expected


def test_an_equal_hash_of_other_tokens_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "window_hashes", lambda ids: np.zeros(len(ids), dtype=np.uint64))
    forest = forest_of([1, 2, *range(10, 50)], [1, 3, *range(60, 110)])
    assert realigned_forks(forest.segments, forest.token_ids, ALL)[0] == []


def test_a_near_match_wins_over_a_far_one() -> None:
    """Boilerplate that comes again far below must not skip what lies before it."""
    boilerplate, body = list(range(100, 120)), list(range(200, 300))
    heavy = [1, 3, 4, *body, *boilerplate, 5]
    light = [1, 2, *boilerplate, *body]
    forest = forest_of(heavy, light)
    (fork,), _ = realigned_forks(forest.segments, forest.token_ids, ALL)
    assert fork.num_common_tokens == len(body)


def test_runs_that_cross_do_not_both_count() -> None:
    """What one branch holds first and the other last is shared by no prefix, whatever is edited."""
    first, second = list(range(100, 140)), list(range(200, 260))
    forest = forest_of([1, 3, *first, *second, 4], [1, 2, *second, *first])
    (fork,), _ = realigned_forks(forest.segments, forest.token_ids, ALL)
    assert fork.num_common_tokens in (len(first), len(second))


def test_only_the_longest_branches_are_compared_when_there_are_too_many() -> None:
    tail = list(range(100, 160))
    sequences = [[1, 2 + number, *tail[: 20 + number]] for number in range(10)]
    forest = forest_of(*sequences)
    forks, skipped = realigned_forks(forest.segments, forest.token_ids, 3)
    assert len(forks) == 3
    assert skipped == 6
    assert min(fork.num_common_tokens for fork in forks) == 26


def test_real_retokenisation_drift_is_aligned_as_difflib_does() -> None:
    """The ids that a model sampled, and the same conversation tokenised again: five places differ."""
    case = json.loads(gzip.decompress(DRIFT.read_bytes()))
    sampled, again = case["sampled_prefix_ids"], case["rerendered_next_prompt_ids"]
    first = next(i for i, (left, right) in enumerate(zip(sampled, again, strict=False)) if left != right)
    forest = forest_of(sampled, again)
    (fork,), _ = realigned_forks(forest.segments, forest.token_ids, ALL)
    blocks = difflib.SequenceMatcher(None, sampled[first:], again[first:], autojunk=False).get_matching_blocks()
    expected = sum(block.size for block in blocks if block.size >= WINDOW)
    assert fork.num_common_tokens == expected > 100
