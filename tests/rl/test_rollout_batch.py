"""What an update scores before it begins, and how its trees are cut into mini-batches."""

import pytest

from treewise.errors import ConfigError, DataError
from treewise.objectives import GRPO, REINFORCE, SFT
from treewise.rl.rollout_batch import Streams, choose_streams, credit, has_all, trees_per_batch, without_groups
from treewise.tree.trajectory import Trajectory


def tree(group="g", rewards=(1.0, 0.0), **streams):
    return [Trajectory([1, 2, 3 + i], group=group, reward=value, **streams) for i, value in enumerate(rewards)]


BARE = [tree()]
OWN = [tree(old_logprobs=[0, -1, -1], ref_logprobs=[0, -2, -2])]
SAMPLED = [tree(sampler_logprobs=[0, -1, -1])]

CHOICES = [
    (GRPO(), BARE, "auto", 1, Streams(None, None)),
    (GRPO(), BARE, "auto", 2, Streams("policy", None)),
    (REINFORCE(), BARE, "auto", 2, Streams(None, None)),
    (GRPO(), BARE, "recompute", 1, Streams("policy", None)),
    (GRPO(beta=0.1), BARE, "auto", 1, Streams(None, "reference")),
    (GRPO(beta=0.1), OWN, "auto", 2, Streams("given", "given")),
    (GRPO(), OWN, "recompute", 2, Streams("policy", None)),
    (GRPO(), SAMPLED, "sampler", 2, Streams("sampler", None)),
    (GRPO(), OWN, "given", 2, Streams("given", None)),
    (SFT(), OWN, "auto", 2, Streams(None, None)),
]


@pytest.mark.parametrize(("objective", "trees", "old", "num_updates", "expected"), CHOICES)
def test_streams_are_computed_only_where_they_are_needed(objective, trees, old, num_updates, expected):
    assert choose_streams(objective, trees, old, num_updates) == expected


def test_streams_that_are_not_there_are_said():
    with pytest.raises(DataError, match="no sampler_logprobs; use old_logprobs='recompute'"):
        choose_streams(GRPO(), BARE, "sampler", 1)
    with pytest.raises(ConfigError, match="old_logprobs='no' is unknown"):
        choose_streams(GRPO(), BARE, "no", 1)
    with pytest.raises(DataError, match="2 of 4 rows have them"):
        has_all([*BARE, *OWN], "old_logprobs")


def test_mini_batches_see_every_tree_once():
    assert [trees_per_batch(8, count, 1) for count in (1, 2, 3, 8)] == [8, 4, 3, 1]
    assert [trees_per_batch(8, count, 2) for count in (1, 2, 4)] == [4, 2, 1]
    for wrong in (0, 9):
        with pytest.raises(ConfigError, match=f"mini_batches={wrong}: give 1 to 8"):
            trees_per_batch(8, wrong, 1)


def test_advantages_are_of_all_groups_and_flat_groups_can_go():
    trees, report = credit([tree("a"), tree("b", (1.0, 1.0)), tree("c", (0.0, 3.0, 0.0))], "dr_grpo", {})
    assert [[float(item.advantages[0]) for item in each] for each in trees] == [[0.5, -0.5], [0, 0], [-1, 2, -1]]
    left = without_groups(trees, report.zero_variance_groups)
    assert [each[0].group for each in left] == ["a", "c"]


def test_given_advantages_stay():
    trees, report = credit([tree(advantages=0.25)], "given", {})
    assert report is None
    assert trees[0][0].advantages.tolist() == [0.25] * 3
    assert trees[0][0].rollout_weight == 2
