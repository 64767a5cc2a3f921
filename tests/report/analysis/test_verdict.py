"""The verdict: ratios against one row per conversation, and the largest avoidable loss."""

import numpy as np

import treewise as tw
from treewise.data import LoadReport
from treewise.report.analysis.facts import inspect_forests, row_tokens
from treewise.report.analysis.lost_sharing import LostCollector, verdict
from treewise.report.analysis.token_text import TokenText
from treewise.report.terminal import short_name

SHARED = np.random.default_rng(0).integers(100, 5000, 400)


def lines_of(*trajectories):
    return lines_of_trees(list(trajectories))


def lines_of_trees(*trees):
    forests = [(f"tree {number}", tw.Forest.from_trajectories(each)) for number, each in enumerate(trees)]
    lost = LostCollector(TokenText())
    for each in forests:
        lost.add(*each)
    report = inspect_forests(forests, LoadReport(num_files=1, num_records=2))
    return verdict(report, lost.result())


def row(ids, **fields):
    return tw.Trajectory(np.asarray(ids), **fields)


def test_a_conversation_is_the_longest_trajectory_of_its_record_or_rollout():
    calls = [row([1, 2], source="a:1#0"), row([1, 2, 3, 4], source="a:1#1"), row([1, 2, 5], source="a:2")]
    assert row_tokens(tw.Forest.from_trajectories(calls)) == 4 + 3
    ends = {(1, 2, 3): 0, (1, 2, 3, 4): 0, (1, 5): 1}
    parts = [row(ids, group="g", rollout=rollout) for ids, rollout in ends.items()]
    assert row_tokens(tw.Forest.from_trajectories(parts)) == 4 + 2


def test_every_trained_leaf_of_logged_calls_counts():
    """A rollout that was cut into several rows trains them all; the longest alone was 0.49 of the tree's tokens."""
    calls = [
        row([1, 2, *tail], group="g", rollout="r", source=f"a:{n}") for n, tail in enumerate(([3, 4], [5, 6], [7], [3]))
    ]
    forest = tw.Forest.from_trajectories(calls)
    assert row_tokens(forest) == 4 + 4 + 3 == forest.num_leaf_tokens


def test_equal_rewards_stand_beside_the_advice():
    rows = [row([*SHARED, n], source=f"r:{n}", group="g", rollout=n, reward=1.0) for n in (1, 2)]
    assert lines_of(*rows)[2].startswith(
        "change: nothing; train as it is. Reinforcement learning learns nothing from 1 group"
    )


def test_an_avoidable_loss_is_named_with_the_ratio_without_it():
    weights = np.zeros(401)
    weights[-1] = 1
    rows = [row([first, *SHARED], loss_weights=weights, source=f"r:{first}") for first in (7, 8)]
    worth, loss, change = lines_of(*rows)
    assert worth.startswith("worth: flat rows hold 1.00 times as many tokens as the trees; against one row")
    assert "little to gain" in worth
    assert loss.startswith(
        "lost sharing: prompt differs, 49.9% of the tree tokens (400 tokens); without it flat rows hold 2.00"
    )
    assert change == "change: move what differs to the end of the prompt"


def test_nothing_to_change():
    worth, loss, change = lines_of(row([*SHARED, 1], source="r:1"), row([*SHARED, 2], source="r:2"))
    assert worth == "worth: flat rows hold 2.00 times as many tokens as the trees"
    assert "none that a change" in loss
    assert change == "change: nothing; train as it is"


def test_trees_that_begin_alike_are_worth_a_batch():
    """Records that name no group are trees of one row each; a batch computes their common prompt once."""
    trees = [[row([*SHARED, 1], source="a:1")], [row([*SHARED, 2], source="a:2")]]
    worth, _, change = lines_of_trees(*trees)
    assert worth == (
        "worth: flat rows hold 1.00 times as many tokens as the trees; trees begin alike (400 tokens), and "
        "in one batch flat rows hold 2.00 times as many tokens as the trees"
    )
    assert change.startswith("change: let trees that begin alike meet: name them one tree (group, or group_by)")
    assert "little to gain" in lines_of_trees([row(SHARED[:200], source="a:1")], [row(SHARED[200:], source="a:2")])[0]


def test_each_way_of_making_rows_has_its_ratio():
    """A record of two calls, of which the first is the beginning of the second, and another record of one call."""
    calls = [row([*SHARED[:100]], source="a:1#0"), row(SHARED, source="a:1#1"), row([*SHARED, 1], source="a:2")]
    assert lines_of(*calls)[0] == (
        "worth: one row per conversation holds 2.00 times as many tokens as the trees, rows of the leaves 1.00 times, "
        "a row of each trajectory 2.25 times"
    )


def test_short_names_stay_apart():
    names = [f"a-very-long-prefix-of-every-task-in-the-set-{number}" for number in range(3)]
    short = [short_name(name) for name in names]
    assert len(set(short)) == 3
    assert all(len(name) <= 32 for name in short)
    assert short_name("short") == "short"
