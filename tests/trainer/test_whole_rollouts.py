"""Rows of one rollout in several items of a data set are one rollout to every step, as in a loop over flat rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.flat_objectives import loss_of_rows, run_alone
from tests.trainer.helpers import VOCABULARY, losses, tiny_model
from treewise.advantages import with_rollout_weights
from treewise.data import load_trees, mix
from treewise.engine.engine import TreeEngine
from treewise.errors import DataError
from treewise.objectives import DPO, GRPO, GSPO, KTO, SFT, PolicyGradient
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.trainer.whole_rollouts import with_whole_rollouts
from treewise.tree.forest import Forest, forest_of
from treewise.tree.trajectory import Trajectory


def rows_of_rollouts(num_groups=2, seed=0):
    """Two rollouts a group, of two turns each: a row of the first, and one of both behind the other. In any order."""
    rng, rows = np.random.default_rng(seed), []
    for group in range(num_groups):
        prompt = rng.integers(3, VOCABULARY, 4).tolist()
        for number in range(2):
            first, result, second = (rng.integers(3, VOCABULARY, count).tolist() for count in (3, 2, 2))
            for ids, weights in (
                (prompt + first, [0] * 4 + [1] * 3),
                (prompt + first + result + second, [0] * 4 + [1] * 3 + [0] * 2 + [1] * 2),
            ):
                rows.append(
                    Trajectory(
                        ids,
                        weights,
                        advantages=1.0 - 1.7 * number,
                        reward=float(number),
                        group=f"g{group}",
                        rollout=number,
                        old_logprobs=-4 - rng.random(len(ids)),
                        ref_logprobs=-4 - rng.random(len(ids)),
                        source=f"row {len(rows)}",
                    )
                )
    return [rows[index] for index in rng.permutation(len(rows))]


class KeptGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def step_of(folder, dataset, objective, **settings):
    """Loss and gradient of one optimizer step over all of the data."""
    kept = KeptGradients()
    args = TreeTrainingArguments(
        output_dir=str(folder),
        **{
            **{"max_steps": 1, "max_grad_norm": 0.0, "optim": "sgd", "report_to": "none", "use_cpu": True},
            **{"disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 8, "max_tokens": None},
            **settings,
        },
    )
    trainer = TreeTrainer(tiny_model(), args, train_dataset=dataset, objective=objective, callbacks=[kept])
    trainer.train()
    return losses(trainer)[0], kept.gradient


def flat_step(items, objective):
    model = tiny_model()
    loss = loss_of_rows(run_alone(model, items), items, objective)
    loss.backward()
    return float(loss.detach()), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def assert_equal(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=2e-5)
    assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 1e-5


OBJECTIVES = {
    "grpo": GRPO(),
    "rollout_sum": PolicyGradient(normalization="rollout_sum", constant=5.0),
    "per_rollout": PolicyGradient(weighting="per_rollout"),
    "gspo": GSPO(),
    "sequence weights": GRPO(ratio_level="sequence", weighting="per_rollout"),
    "dpo": DPO(),
    "kto": KTO(baseline="zero"),
}
CUTS = {
    "side by side": {"merge_across_trees": False},
    "merged": {"max_tokens": 9},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "merge_across_trees": False},
}


@pytest.mark.representatives("side by side-grpo", "side by side-gspo", "accumulated-per_rollout", "accumulated-kto")
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_step_counts_each_rollout_once(tmp_path, name, cut):
    rows, objective = rows_of_rollouts(), OBJECTIVES[name]
    assert_equal(step_of(tmp_path, rows, objective, **CUTS[cut]), flat_step(rows, objective))


@pytest.mark.parametrize("cut", CUTS)
def test_trees_that_count_apart_stay_apart(tmp_path, cut):
    """Under `once` each item is a tree of its own, so what two items share counts in both: flat rows."""
    rows = rows_of_rollouts()
    found = step_of(tmp_path, rows, GRPO(weighting="once"), **CUTS[cut])
    assert_equal(found, flat_step(rows, GRPO()))
    engine = TreeEngine(tiny_model(), check=False)
    whole = engine.step([Forest.from_trajectories([row]) for row in rows], GRPO(weighting="once"))
    assert found[0] == pytest.approx(whole.loss, rel=1e-6)


def test_rows_with_the_weight_of_their_rollout_may_be_in_any_batch(tmp_path):
    rows = with_rollout_weights(rows_of_rollouts())
    assert with_whole_rollouts(rows, GRPO()) is rows
    assert_equal(step_of(tmp_path, rows, GRPO(), **CUTS["accumulated"]), flat_step(rows, GRPO()))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["grpo", "kto"])
def test_an_evaluation_is_that_of_the_set_at_any_batch_size(tmp_path, name, size):
    rows, objective = rows_of_rollouts(), OBJECTIVES[name]
    args = TreeTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_eval_batch_size=size
    )
    trainer = TreeTrainer(tiny_model(), args, train_dataset=rows, objective=objective, eval_dataset=rows)
    expected = pytest.approx(flat_step(rows, objective)[0], rel=2e-5)
    assert trainer.evaluate()["eval_loss"] == expected
    assert trainer.evaluate(rows)["eval_loss"] == expected


@pytest.mark.parametrize("size", [1, 4])
def test_an_evaluation_has_one_baseline_of_all_mismatched_completions(tmp_path, size):
    rows = rows_of_rollouts()
    rows += [replace(row, reward=None, rollout=f"of {row.rollout}") for row in rows[:3]]
    trees = [[row for row in rows if row.group == group] for group in ("g0", "g1")]
    args = TreeTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_eval_batch_size=size
    )
    trainer = TreeTrainer(tiny_model(), args, train_dataset=trees, objective=KTO(), eval_dataset=trees)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(flat_step(rows, KTO())[0], rel=2e-5)


def test_the_engine_merges_trees_of_one_rollout_or_names_them():
    rows = rows_of_rollouts()
    forests = [Forest.from_trajectories([row]) for row in rows]
    engine = TreeEngine(tiny_model(), check=False)
    for objective in (GSPO(), KTO(baseline="zero"), PolicyGradient(weighting="per_rollout")):
        expected = pytest.approx(flat_step(rows, objective)[0], rel=2e-5)
        assert engine.evaluate(forests, objective).loss == expected
        assert engine.evaluate(Forest.concatenate(forests), objective).loss == expected
        assert engine.step(engine.prepare(forests), objective).loss == expected
    with pytest.raises(
        DataError, match=r"rows of rollout \d of group 'g\d' are in several trees, and weighting='once'"
    ):
        engine.step(forests, GSPO(weighting="once"))


def test_items_are_joined_where_a_loss_counts_rollouts_and_nowhere_else():
    rows = [*rows_of_rollouts(), Trajectory([3, 4, 5], advantages=1.0, group="g0")]  # one of no rollout
    for objective in (SFT(), PolicyGradient(), SFT(weighting="once")):
        args = TreeTrainingArguments(use_cpu=True)
        trainer = TreeTrainer(tiny_model(), args, train_dataset=rows, objective=objective)
        assert trainer.train_dataset is rows
    found = with_whole_rollouts(rows, GRPO())
    assert [len(forest_of(item).trajectories) for item in found] == [2, 2, 2, 2, 1]
    assert [forest_of(item).num_trees for item in found] == [1] * 5
    apart = with_whole_rollouts(rows, GRPO(weighting="once"))
    assert [forest_of(item).num_trees for item in apart] == [2, 2, 2, 2, 1]
    assert [len(forest_of(item).trajectories) for item in with_whole_rollouts(rows, DPO())] == [5, 4]
    assert with_whole_rollouts({"a": rows}, GRPO()).keys() == {"a"}
    whole = [[row for row in rows if row.group == group] for group in ("g0", "g1")]
    assert with_whole_rollouts(whole, GRPO()) is whole


def test_rollouts_of_files_are_whole_too():
    """Each record of a group has rows of its own, and both have rows of one rollout."""
    records = [
        {"group": "g", "seqs": [{"ids": [1, 2, 3 + number], "loss": [[2, 3]], "rollout": "r"}]} for number in range(2)
    ]
    trees = load_trees(records)
    assert len(trees) == 2
    found = with_whole_rollouts(trees, GRPO())
    assert [len(forest_of(item).trajectories) for item in found] == [2]
    assert found.fingerprint != trees.fingerprint


def test_copies_of_a_mixture_are_rollouts_of_their_own(tmp_path):
    rows = [replace(row, old_logprobs=None) for row in rows_of_rollouts() if row.group == "g0"]
    records = [
        {name: getattr(row, name) for name in ("group", "rollout", "reward")}
        | {name: getattr(row, name).tolist() for name in ("token_ids", "loss_weights", "advantages")}
        for row in rows
    ]
    twice = mix([load_trees(records), load_trees(records)], [2, 1])
    assert with_whole_rollouts(twice, GRPO()) is twice
    items = [item for tree in twice for item in tree.trajectories]
    assert len({item.group for item in items}) == 3
    found = step_of(tmp_path, twice, GRPO(), per_device_train_batch_size=3)
    assert_equal(found, flat_step(items, GRPO()))
    assert found[0] == pytest.approx(flat_step(rows, GRPO())[0], rel=2e-5)


def test_ends_of_a_declared_tree_are_rows_of_their_rollouts(tmp_path):
    nodes = [
        {"token_ids": [1, 2], "loss_weights": 0},
        {"parent": 0, "token_ids": [3, 4], "advantages": 1.0, "rollout": "a", "end": True},
        {"parent": 0, "token_ids": [5, 6], "advantages": 1.0, "rollout": "a"},
        {"parent": 0, "token_ids": [7], "advantages": -0.5, "rollout": "b"},
    ]
    trees = load_trees([{"nodes": nodes, "group": "g"}])
    assert_equal(step_of(tmp_path, trees, GRPO()), flat_step(trees[0].labelled_trajectories(), GRPO()))
    assert {row.rollout for row in trees[0].forest().trajectories} == {"a", "b"}
