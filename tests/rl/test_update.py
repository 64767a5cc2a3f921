"""The step before an update, as a library: advantages, choice of streams, saved log-probs; nothing of the command."""

from dataclasses import replace

import numpy as np
import pytest

import treewise as tw
from tests.damage import damages
from treewise.errors import CheckpointError, ConfigError, DataError
from treewise.objectives import GRPO, REINFORCE, SFT, PolicyGradient
from treewise.rl.update import (
    SCORES,
    Update,
    credit,
    credited,
    describe,
    has_all,
    load_scores,
    save_scores,
    trees_per_batch,
    with_streams,
)
from treewise.tree.trajectory import Trajectory

FACTS = ["fingerprint", "model", None, "float32"]


def rollouts(*rewards, group="g", **streams):
    labels = {"group": group, **streams}
    return [Trajectory([1, 2, 3 + index], reward=reward, **labels) for index, reward in enumerate(rewards)]


def test_an_objective_without_advantages_leaves_the_rows_alone():
    trees = [rollouts(0, 1)]
    assert credited(trees, SFT()) == Update(trees)


@pytest.mark.parametrize(
    ("objective", "method", "expected"),
    [
        (tw.GRPO(), "grpo", [-0.7071, 0.7071]),
        (tw.DAPO(), "grpo", [-0.7071, 0.7071]),
        (tw.GSPO(), "grpo", [-0.7071, 0.7071]),
        (tw.CISPO(), "grpo", [-0.7071, 0.7071]),
        (tw.DrGRPO(max_length=8), "dr_grpo", [-0.5, 0.5]),
        (tw.REINFORCE(), "rloo", [-1, 1]),
        (replace(tw.GRPO(), usual_advantages="rloo"), "rloo", [-1, 1]),
    ],
)
def test_rewards_become_advantages_as_the_objective_says(objective, method, expected):
    update = credited([rollouts(0, 1)], objective)
    assert update.method == method
    assert [item.advantages[1] for item in update.trees[0]] == pytest.approx(expected, abs=1e-3)


def test_no_advantages_are_guessed():
    for objective in (tw.PPO(), PolicyGradient()):
        with pytest.raises(ConfigError, match="the objective has no usual advantages, and the rows hold none"):
            credited([rollouts(0, 1)], objective)
        assert credited([rollouts(0, 1)], objective, method="rloo").method == "rloo"
        assert credited([rollouts(0, 1, advantages=1.0)], objective).method == "given"
    with pytest.raises(ConfigError, match="advantages='grpo', but SFT takes none"):
        credited([rollouts(0, 1)], SFT(), method="grpo")


def test_an_advantage_on_untrained_tokens_is_none():
    rows = rollouts(0, 1, loss_weights=[0, 0, 1], advantages=[0, 1, 0])
    with pytest.raises(ConfigError, match="every advantage is zero"):
        credited([rows], GRPO())
    assert credited([rollouts(0, 1, loss_weights=[0, 1, 1], advantages=[0, 1, 0])], GRPO()).method == "given"
    silent = rollouts(0, group="one", loss_weights=[0, 0, 1], advantages=[0, 1, 0])
    shown = describe(Update([rollouts(0, 1, advantages=1.0), silent], "given"), "", "")
    assert "rows with an advantage 2 of 3" in " ".join(shown.split())


def test_groups_without_variance_are_left_out_on_demand():
    trees = [rollouts(1, 1, group="flat"), rollouts(0, 1), rollouts(1, group="one")]
    assert credited(trees, GRPO()).num_dropped == 0
    update = credited(trees, GRPO(), drop_flat_groups=True)
    assert (update.num_dropped, [each[0].group for each in update.trees]) == (2, ["g"])
    alone = credited(trees, GRPO(), method="turns", settings={"baseline": "none"}, drop_flat_groups=True)
    assert alone.num_dropped == 0  # a group of one that is compared with nothing, and learns
    text = describe(update, "grpo", "none")
    assert "rows with an advantage   2 of 2" in text
    assert "groups of one rollout    1 (left out)" in text
    message = r"every advantage is zero: nothing would be trained .* 2 groups, of which 1 without variance, 1 of one"
    with pytest.raises(ConfigError, match=message):
        credited([trees[0], trees[2]], GRPO())


def test_rollouts_without_a_reward_are_set_aside_and_counted():
    rows = rollouts(0, None, 1)
    later = [replace(rows[0], reward=None, rollout="a", source="x:4"), replace(rows[2], rollout="a")]
    update = credited([rows, rollouts(None, group="h"), later], GRPO())
    expected = credited([[rows[0], rows[2]], later], GRPO())
    assert [[each.advantages.tolist() for each in tree] for tree in update.trees] == [
        [each.advantages.tolist() for each in tree] for tree in expected.trees
    ]
    assert (update.rewards.num_rollouts, update.rewards.num_failed) == (5, 2)
    assert update.rewards.first == "rollout None of group g"
    assert "without a reward         2 set aside (first: rollout None of group g)" in describe(update, "grpo", "")
    assert update.report == expected.report
    assert "without a reward" not in describe(expected, "grpo", "")


def test_more_rollouts_without_a_reward_than_may_be_are_an_error():
    rows = rollouts(0, None, 1)
    message = r"1 of 3 rollouts without reward, more than max_failed=0.25 of them. The first: rollout None of group g."
    with pytest.raises(DataError, match=message):
        credited([rows], GRPO(), max_failed=0.25)
    with pytest.raises(DataError, match=r"rollout None of group g: no reward in any row. Give each rollout `reward`"):
        credited([rollouts(None, None)], GRPO())
    given = credited([rollouts(None, None, advantages=1.0)], GRPO())
    assert (given.method, given.rewards.num_failed, len(given.trees[0])) == ("given", 0, 2)


def test_a_reference_that_nothing_uses_is_an_error():
    update = credited([rollouts(0, 1)], GRPO())
    with pytest.raises(ConfigError, match="no KL to it"):
        with_streams(update, GRPO(), num_updates=1, has_reference=True)
    assert with_streams(update, GRPO(beta=0.1), num_updates=2).computed_streams == ["old_logprobs", "ref_logprobs"]


@pytest.fixture
def update():
    trees = [rollouts(0, 1, old_logprobs=[0, -1, -2]), rollouts(1, 0, group="h", old_logprobs=[0, -3, -4])]
    return Update(trees, "grpo", old="policy", num_without_sampler=4)


def test_saved_scores_come_back_to_the_rows(update, tmp_path):
    save_scores(tmp_path, update, FACTS)
    bare = replace(update, trees=[[replace(item, old_logprobs=None) for item in tree] for tree in update.trees])
    loaded = load_scores(tmp_path, bare, FACTS)
    for tree, expected in zip(loaded.trees, update.trees, strict=True):
        for item, other in zip(tree, expected, strict=True):
            assert np.array_equal(item.old_logprobs, other.old_logprobs)


def test_scores_of_other_data_or_choices_are_not_used(update, tmp_path):
    assert load_scores(tmp_path, update, FACTS) is None
    save_scores(tmp_path, update, FACTS)
    assert load_scores(tmp_path, update, ["other", *FACTS[1:]]) is None
    assert load_scores(tmp_path, replace(update, num_dropped=1), FACTS) is None


def test_damaged_scores_are_a_warning_and_are_not_used(update, tmp_path, caplog):
    save_scores(tmp_path, update, FACTS)
    for how in damages(tmp_path / SCORES):
        caplog.clear()
        assert load_scores(tmp_path, update, FACTS) is None, how
        [line] = caplog.messages
        assert line.startswith(f"{tmp_path / SCORES}: damaged (")
        assert line.endswith("): the log-probs are computed again")
    assert load_scores(tmp_path, update, FACTS) is not None


def test_scores_that_cannot_be_written_are_an_error(update, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="the log-probs cannot be written"):
        save_scores(tmp_path / "file", update, FACTS)


def test_what_needs_no_computing_is_not_saved(update, tmp_path):
    save_scores(tmp_path, replace(update, old="given"), FACTS)
    assert not (tmp_path / SCORES).exists()


def test_the_description_names_each_choice(update):
    text = describe(update, "grpo", "the starting policy")
    assert "computed with the policy before the update" in text
    assert "not needed (no KL)" in text


BARE = [rollouts(1.0, 0.0)]
OWN = [rollouts(1.0, 0.0, old_logprobs=[0, -1, -1], ref_logprobs=[0, -2, -2])]
SAMPLED = [rollouts(1.0, 0.0, sampler_logprobs=[0, -1, -1])]

CHOICES = [
    (GRPO(), BARE, "auto", 1, (None, None)),
    (GRPO(), BARE, "auto", 2, ("policy", None)),
    (REINFORCE(), BARE, "auto", 2, (None, None)),
    (GRPO(), BARE, "recompute", 1, ("policy", None)),
    (GRPO(beta=0.1), BARE, "auto", 1, (None, "reference")),
    (GRPO(beta=0.1), OWN, "auto", 2, ("given", "given")),
    (GRPO(), OWN, "recompute", 2, ("policy", None)),
    (GRPO(), SAMPLED, "sampler", 2, ("sampler", None)),
    (GRPO(), OWN, "given", 2, ("given", None)),
    (SFT(), OWN, "auto", 2, (None, None)),
]


@pytest.mark.parametrize(("objective", "trees", "old", "num_updates", "expected"), CHOICES)
def test_streams_are_computed_only_where_they_are_needed(objective, trees, old, num_updates, expected):
    update = with_streams(Update(trees), objective, num_updates=num_updates, old_logprobs=old)
    assert (update.old, update.ref) == expected


def test_streams_that_are_not_there_are_said():
    with pytest.raises(DataError, match="no sampler_logprobs; use old_logprobs='recompute'"):
        with_streams(Update(BARE), GRPO(), num_updates=1, old_logprobs="sampler")
    with pytest.raises(ConfigError, match="old_logprobs='no' is unknown"):
        with_streams(Update(BARE), GRPO(), num_updates=1, old_logprobs="no")
    with pytest.raises(DataError, match="2 of 4 rows have them"):
        has_all([*BARE, *OWN], "old_logprobs")


def test_mini_batches_see_every_tree_once():
    assert [trees_per_batch(8, count, 1) for count in (1, 2, 3, 8)] == [8, 4, 3, 1]
    assert [trees_per_batch(8, count, 2) for count in (1, 2, 4)] == [4, 2, 1]
    for wrong in (0, 9):
        with pytest.raises(ConfigError, match=f"mini_batches={wrong}: give 1 to 8"):
            trees_per_batch(8, wrong, 1)


def test_advantages_are_of_all_groups():
    trees, _ = credit(
        [rollouts(1, 0, group="a"), rollouts(1, 1, group="b"), rollouts(0, 3, 0, group="c")], "dr_grpo", {}
    )
    assert [[float(item.advantages[0]) for item in each] for each in trees] == [[0.5, -0.5], [0, 0], [-1, 2, -1]]


def test_settings_that_nothing_reads_are_refused():
    given = [rollouts(1, 0, advantages=0.25)]
    with pytest.raises(ConfigError, match=r"unknown setting 'scale' of advantages='given'. Known: none"):
        credited(given, GRPO(), settings={"scale": "batch"})
    assert credited(given, GRPO(), method="grpo", settings={"scale": "batch"}).method == "grpo"
    with pytest.raises(ConfigError, match=r"advantages_settings=\{'scale': 'batch'\}, but SFT takes none"):
        credited(given, SFT(), settings={"scale": "batch"})


def test_given_advantages_stay():
    trees, report = credit([rollouts(1, 0, advantages=0.25)], "given", {})
    assert report is None
    assert trees[0][0].advantages.tolist() == [0.25] * 3
    assert trees[0][0].rollout_weight == 2
