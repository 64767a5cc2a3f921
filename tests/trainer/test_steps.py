"""An optimizer step is a set of trees, with the loss and gradients of flat training however it is cut up."""

import pytest
import torch
from transformers import TrainerCallback

from tests.trainer.helpers import flat_loss, losses, tiny_model
from treewise.objectives import GRPO, SFT
from treewise.trainer import TreeTrainer, TreeTrainingArguments


class KeepGradients(TrainerCallback):
    """Copies of the gradients that the optimizer is about to take, step after step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.steps.append([parameter.grad.clone() for parameter in model.parameters()])


def gradients_of_step(make_trainer, trees, **settings):
    keep = KeepGradients()
    trainer = make_trainer(trees, callbacks=[keep], max_grad_norm=0.0, max_steps=1, **settings)
    trainer.train()
    gradients = torch.cat([grad.flatten() for grad in keep.steps[0]])
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(float(gradients.norm()), rel=1e-5)
    return gradients, losses(trainer)[0]


@pytest.fixture
def reference(trees):
    """Loss and gradients of one flat step over all trees, by transformers alone."""
    model = tiny_model()
    loss = flat_loss(model, [item for tree in trees for item in tree])
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), float(loss.detach())


CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the newer name first
CUTS = {
    "whole": {"per_device_train_batch_size": 7},
    "two accumulations": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "tree by tree": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 7},
    "small budget": {"per_device_train_batch_size": 7, "max_tokens": 16},
    "unmerged": {"per_device_train_batch_size": 7, "merge_across_trees": False},
    "checkpointing": {
        next(name for name in CHECKPOINTING if name in TreeTrainingArguments.__dataclass_fields__): True,
        "per_device_train_batch_size": 7,
        "max_tokens": 40,
    },
    "workers": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1},
}


@pytest.mark.representatives("two accumulations", "small budget", "checkpointing")
@pytest.mark.parametrize("settings", CUTS.values(), ids=CUTS.keys())
def test_a_step_has_flat_loss_and_gradients_however_it_is_cut(make_trainer, trees, reference, settings):
    gradients, loss = gradients_of_step(make_trainer, trees, **settings)
    expected, expected_loss = reference
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert float((gradients - expected).norm() / expected.norm()) < 2e-6


@pytest.mark.parametrize(
    ("objective", "count"), [(SFT(), 1), (SFT(weighting="once"), 3), (GRPO(weighting="per_rollout"), 1)]
)
def test_trees_stay_apart_under_an_objective_that_counts_a_token_once_per_tree(tmp_path, trees, objective, count):
    sizes = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 3}
    args = TreeTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **sizes)
    trainer = TreeTrainer(tiny_model(), args, train_dataset=trees, eval_dataset=trees, objective=objective)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        assert len(next(iter(loader))) == count


@pytest.mark.representatives("once")
@pytest.mark.parametrize(
    "settings",
    [
        {"normalization": "trajectory_mean"},
        {"normalization": "constant", "constant": 50.0},
        {"weighting": "once"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_accumulation_changes_no_gradient_under_any_normalization(make_trainer, trees, settings):
    whole, whole_loss = gradients_of_step(make_trainer, trees, per_device_train_batch_size=7, **settings)
    cut = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    parts, parts_loss = gradients_of_step(make_trainer, trees, **cut, **settings)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-6)
    assert float((parts - whole).norm() / whole.norm()) < 1e-6


@pytest.mark.representatives("2")
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_an_epoch_trains_every_tree_once(make_trainer, trees, accumulation):
    trainer = make_trainer(
        trees, num_train_epochs=2, gradient_accumulation_steps=accumulation, merge_across_trees=False
    )
    trained = []
    train = trainer.runner.train_batch
    trainer.runner.train_batch = lambda batch: (trained.extend(batch.forests), train(batch))[1]
    trainer.train()
    names = [forest.trajectories[0].source for forest in trained]
    assert sorted(names[:7]) == sorted(names[7:]) == [f"rows.jsonl:{tree}" for tree in range(7)]


@pytest.mark.representatives("3")
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_evaluation_is_the_token_mean_of_the_set_at_any_batch_size(make_trainer, trees, reference, batch_size):
    trainer = make_trainer(trees, eval_dataset=trees, per_device_eval_batch_size=batch_size)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(reference[1], rel=1e-6)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_several_evaluation_sets_have_names(make_trainer, trees):
    metrics = make_trainer(trees, eval_dataset={"a": trees[:2], "b": trees[2:]}).evaluate()
    assert {"eval_a_loss", "eval_b_loss"} <= set(metrics)


def test_mixed_precision_keeps_float32_parameters(make_trainer, trees, reference):
    gradients, loss = gradients_of_step(make_trainer, trees, per_device_train_batch_size=7, bf16=True)
    expected, expected_loss = reference
    assert gradients.dtype == torch.float32
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    assert float((gradients - expected).norm() / expected.norm()) < 3e-2


def test_batches_of_a_step_are_computed_as_one(make_trainer, trees):
    """Under a budget: what they have in common is computed once. Without one, batches bound the memory."""
    joined, apart = (
        make_trainer(trees, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_tokens=most)
        for most in (10_000, None)
    )
    whole = make_trainer(trees, max_steps=1, per_device_train_batch_size=7, max_tokens=10_000)
    logs = []
    for trainer in (joined, whole, apart):
        trainer.train()
        logs.append(next(entry for entry in trainer.state.log_history if "tree_tokens" in entry))
    assert logs[0]["tree_tokens"] == logs[1]["tree_tokens"] < logs[2]["tree_tokens"]
    assert logs[0]["loss"] == pytest.approx(logs[2]["loss"], rel=1e-5)
    assert logs[0]["grad_norm"] == pytest.approx(logs[2]["grad_norm"], rel=1e-4)
