"""The step before an update, as a library: advantages, choice of streams, saved log-probs; nothing of the command."""

from dataclasses import replace

import numpy as np
import pytest

from treewise.errors import CheckpointError, ConfigError
from treewise.objectives import GRPO, SFT
from treewise.rl.rollout_batch import Streams
from treewise.rl.update import SCORES, Update, credited, describe, load_scores, save_scores, with_streams
from treewise.tree.trajectory import Trajectory

FACTS = ["fingerprint", "model", None, "float32"]


def rollouts(*rewards, group="g", **streams):
    labels = {"group": group, **streams}
    return [Trajectory([1, 2, 3 + index], reward=reward, **labels) for index, reward in enumerate(rewards)]


def test_an_objective_without_advantages_leaves_the_rows_alone():
    trees = [rollouts(0, 1)]
    assert credited(trees, SFT(), name="sft") == Update(trees)


def test_rewards_become_advantages_by_the_usual_method():
    update = credited([rollouts(0, 1)], GRPO(), name="grpo")
    assert update.method == "grpo"
    assert [item.advantages[1] for item in update.trees[0]] == pytest.approx([-0.7071, 0.7071], abs=1e-3)


def test_groups_without_variance_are_left_out_on_demand():
    trees = [rollouts(1, 1, group="flat"), rollouts(0, 1)]
    assert credited(trees, GRPO(), name="grpo").num_dropped == 0
    update = credited(trees, GRPO(), name="grpo", drop_flat_groups=True)
    assert (update.num_dropped, len(update.trees)) == (1, 1)
    with pytest.raises(ConfigError, match="every advantage is zero: nothing would be trained"):
        credited(trees[:1], GRPO(), name="grpo", drop_flat_groups=True)


def test_a_reference_that_nothing_uses_is_an_error():
    update = credited([rollouts(0, 1)], GRPO(), name="grpo")
    with pytest.raises(ConfigError, match="no KL to it"):
        with_streams(update, GRPO(), num_updates=1, has_reference=True)
    assert with_streams(update, GRPO(beta=0.1), num_updates=2).computed_streams == ["old_logprobs", "ref_logprobs"]


@pytest.fixture
def update():
    trees = [rollouts(0, 1, old_logprobs=[0, -1, -2]), rollouts(1, 0, group="h", old_logprobs=[0, -3, -4])]
    return Update(trees, "grpo", streams=Streams("policy", None), num_without_sampler=4)


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


@pytest.mark.parametrize("damage", [lambda raw: b"damaged", lambda raw: raw[:-1], lambda raw: raw[:-2] + b"??"])
def test_damaged_scores_are_a_warning_and_are_not_used(update, tmp_path, caplog, damage):
    save_scores(tmp_path, update, FACTS)
    (tmp_path / SCORES).write_bytes(damage((tmp_path / SCORES).read_bytes()))
    assert load_scores(tmp_path, update, FACTS) is None
    assert f"{SCORES} is damaged" in caplog.text


def test_scores_that_cannot_be_written_are_an_error(update, tmp_path):
    with pytest.raises(CheckpointError, match="the log-probs cannot be written"):
        save_scores(tmp_path / "missing", update, FACTS)


def test_what_needs_no_computing_is_not_saved(update, tmp_path):
    save_scores(tmp_path, replace(update, streams=Streams("given", None)), FACTS)
    assert not (tmp_path / SCORES).exists()


def test_the_description_names_each_choice(update):
    text = describe(update, "grpo", "the starting policy")
    assert "computed with the policy before the update" in text
    assert "not needed (no KL)" in text
