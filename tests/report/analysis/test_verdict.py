"""The verdict: yes or no against two ways of training, and the largest avoidable loss."""

import numpy as np
import pytest

import treewise as tw
from treewise.data import LoadReport
from treewise.nn.flops import FlopModel, LayerReach
from treewise.report.analysis.facts import inspect_forests
from treewise.report.analysis.lost_sharing import AVOIDABLE, LostCollector
from treewise.report.analysis.token_text import TokenText
from treewise.report.analysis.verdict import MERGED, PER_CALL, REMEDIES, Worth, sentence, verdict_on
from treewise.report.terminal import short_name

SHARED = np.random.default_rng(0).integers(100, 5000, 400)


def lines_of(*trajectories):
    return lines_of_trees(list(trajectories))


def lines_of_trees(*trees, flops=None):
    forests = [(f"tree {number}", tw.Forest.from_trajectories(each)) for number, each in enumerate(trees)]
    lost = LostCollector(TokenText(), flops)
    for each in forests:
        lost.add(*each)
    report = inspect_forests(forests, LoadReport(num_files=1, num_records=2), flops)
    return verdict_on(report, lost.result()).lines


def no_loss():
    return LostCollector(TokenText()).result()


def row(ids, **fields):
    return tw.Trajectory(np.asarray(ids), **fields)


def test_equal_rewards_stand_beside_the_advice():
    rows = [row([*SHARED, n], source=f"r:{n}", group="g", rollout=n, reward=1.0) for n in (1, 2)]
    assert lines_of(*rows)[2].startswith(
        "change: nothing; train as it is. Reinforcement learning learns nothing from 1 group"
    )


def test_an_avoidable_loss_is_named_with_the_ratios_without_it():
    weights = np.zeros(401)
    weights[-1] = 1
    rows = [row([first, *SHARED], loss_weights=weights, source=f"r:{first}") for first in (7, 8)]
    worth, loss, change = lines_of(*rows)
    assert worth == (
        "Not worth it: little or nothing is shared, neither against one row per call (1.0 times by tokens) nor against "
        "trainers that merge turns (1.0 times)."
    )
    assert loss == (
        "lost sharing: prompt differs, 49.9% of the tree tokens (400 tokens); without it share ratio 2.00, "
        "leaf ratio 2.00"
    )
    assert change == "change: move what differs to the end of the prompt"


def test_every_avoidable_cause_has_a_remedy():
    assert set(REMEDIES) == set(AVOIDABLE)


def test_nothing_to_change():
    worth, loss, change = lines_of(row([*SHARED, 1], source="r:1"), row([*SHARED, 2], source="r:2"))
    assert worth == (
        "Worth it against one row per call (2.0 times by tokens) and against trainers that merge turns (2.0 times)."
    )
    assert loss == "lost sharing: none that a change of templates or data could avoid"
    assert change == "change: nothing; train as it is"


def test_a_loss_that_nobody_can_avoid_is_counted_too():
    """Both branches were sampled: nothing is avoidable, and a quarter of the tree is still computed twice."""
    rows = [row([*SHARED[:200], first, *SHARED[200:]], source=f"r:{first}") for first in (7, 8)]
    assert lines_of(*rows)[1] == (
        "lost sharing: none that a change of templates or data could avoid (33.2% of the tree tokens are computed "
        "twice, unavoidably: sampled apart)"
    )


def test_turns_that_continue_one_another_are_no_gain_over_who_merges_them():
    turns = [row(SHARED[:end], source=f"r:1#{end}") for end in (100, 200, 300, 400)]
    assert lines_of(*turns)[0] == (
        "Worth it against one row per call (2.5 times by tokens), not against trainers that merge turns (1.0 times)."
    )


def test_trees_that_begin_alike_are_worth_a_batch():
    """Records that name no group are trees of one row each; a batch computes their common prompt once."""
    trees = [[row([*SHARED, 1], source="a:1")], [row([*SHARED, 2], source="a:2")]]
    worth, _, change = lines_of_trees(*trees)
    assert worth == (
        "Worth it only where trees that begin alike meet in a batch: 2.0 times by tokens against one row per call and "
        "2.0 times against trainers that merge turns with all in one batch; each tree alone 1.0 and 1.0 times."
    )
    assert change.startswith("change: let trees that begin alike meet: name them one tree (group, or group_by)")
    apart = lines_of_trees([row(SHARED[:200], source="a:1")], [row(SHARED[200:], source="a:2")])[0]
    assert apart.startswith("Not worth it")
    trees = [[row([*SHARED, leaf], source=f"a:{leaf}"), row(SHARED, source=f"a:{leaf}#0")] for leaf in (1, 2)]
    assert lines_of_trees(*trees)[0] == (
        "Worth it against one row per call (2.0 times by tokens), not against trainers that merge turns (1.0 times) "
        "unless trees that begin alike meet in a batch (2.0 times with all in one)."
    )


def test_one_verdict_has_one_measure():
    """401 tokens of a linear layer each, and attention: that of one row, of two in which 400 are computed once."""
    flops = FlopModel(1.0, 2.0, 0.0, 0.0, ((LayerReach(), 1.0),), 1, 1, 1, 1)
    trees = [[row([*SHARED, 1], source="a:1")], [row([*SHARED, 2], source="a:2")]]
    worth, *_ = lines_of_trees(*trees, flops=flops)
    own = 3 * 401 + 3.5 * 401 * 402 / 2
    once = 3 * 402 + 3.5 * (400 * 401 / 2 + 2 * 401)
    assert worth.count("by FLOPs") == 1
    assert "by tokens" not in worth
    assert f"{2 * own / once:.1f} times by FLOPs against one row per call" in worth


def test_merged_turns_are_compared_with_a_row_for_each_call():
    """A row of three answers, as `treewise record` writes it: rows that end at 110, 220 and 330 tokens."""
    weights = np.zeros(330)
    for start in (100, 210, 320):
        weights[start : start + 10] = 1
    ids = np.random.default_rng(1).integers(100, 5000, 330)
    worth, *_ = lines_of(row(ids, loss_weights=weights, source="r:1"))
    assert worth == (
        "Worth it against one row per call (2.0 times by tokens), not against trainers that merge turns (1.0 times)."
    )


@pytest.mark.parametrize(
    ("calls", "merged", "begins"),
    [
        (
            8.92,
            1.11,
            "Worth it against one row per call (8.9 times by FLOPs), hardly against trainers that merge turns (1.1",
        ),
        (1.26, 1.24, "Worth it against one row per call (1.3 times by FLOPs), hardly against"),
        (1.2, 1.2, "Hardly worth it against one row per call (1.2 times by FLOPs) and against trainers that merge"),
        (1.2, 1.0, "Hardly worth it against one row per call (1.2 times by FLOPs), not against trainers that merge"),
        (1.04, 1.04, "Not worth it: "),
    ],
)
def test_what_is_printed_decides(calls, merged, begins):
    """1.04 is printed as 1.0, and 1.0 is no gain."""
    assert sentence(Worth(PER_CALL, calls, "FLOPs", None), Worth(MERGED, merged, "FLOPs", None)).startswith(begins)


def test_flops_decide_where_a_model_is_named():
    """Half of the tokens are shared, but attention over a long path is not."""
    rows = [row([*SHARED, *range(9000, 9200), n], source=f"r:{n}") for n in (1, 2)]
    forest = tw.Forest.from_trajectories(rows)
    flops = FlopModel(1.0, 2.0, 0.0, 0.0, ((LayerReach(), 1.0),), 1, 1, 1, 1)
    report = inspect_forests([("t", forest)], LoadReport(num_files=1, num_records=2), flops, "a model")
    per_call, merged = verdict_on(report, no_loss()).worth
    assert (per_call.measure, per_call.times) == ("FLOPs", flops.flat(forest) / flops.tree(forest))
    assert merged.times == flops.leaf(forest) / flops.tree(forest)


def test_short_names_stay_apart():
    names = [f"a-very-long-prefix-of-every-task-in-the-set-{number}" for number in range(3)]
    short = [short_name(name) for name in names]
    assert len(set(short)) == 3
    assert all(len(name) <= 32 for name in short)
    assert short_name("short") == "short"
