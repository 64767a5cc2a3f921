"""An optimizer step is a set of trees, with the loss and gradients of flat training however it is cut up."""

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.trainer.helpers import flat_loss, losses, tiny_model
from treewise.errors import ConfigError, DataError
from treewise.nn.flops import flop_model
from treewise.trainer import TreeTrainingArguments, metrics
from treewise.trainer.data_loader import TreeSampler, collate, survey
from treewise.tree.forest import Forest


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
    return torch.cat([grad.flatten() for grad in keep.steps[0]]), losses(trainer)[0]


@pytest.fixture
def reference(trees):
    """Loss and gradients of one flat step over all trees, by transformers alone."""
    model = tiny_model()
    loss = flat_loss(model, [item for tree in trees for item in tree])
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), float(loss.detach())


CUTS = {
    "whole": {"per_device_train_batch_size": 7},
    "two accumulations": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "tree by tree": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 7},
    "small budget": {"per_device_train_batch_size": 7, "max_tokens": 16},
    "unmerged": {"per_device_train_batch_size": 7, "merge_across_trees": False},
    "workers": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "dataloader_num_workers": 1},
}


@pytest.mark.parametrize("settings", CUTS.values(), ids=CUTS.keys())
def test_a_step_has_flat_loss_and_gradients_however_it_is_cut(make_trainer, trees, reference, settings):
    gradients, loss = gradients_of_step(make_trainer, trees, **settings)
    expected, expected_loss = reference
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert float((gradients - expected).norm() / expected.norm()) < 2e-6


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


def test_merging_across_trees_computes_a_common_prompt_once(trees):
    (merged,) = collate(trees, merges=True)
    apart = collate(trees, merges=False)
    assert merged.num_flat_tokens == sum(forest.num_flat_tokens for forest in apart)
    assert sum(forest.num_tokens for forest in apart) - merged.num_tokens >= 6 * (len(trees) - 1)


def test_every_kind_of_item_is_a_tree(trees):
    forest = Forest.from_trajectories(trees[1])

    class Tree:
        trajectories = None

        def forest(self):
            return forest

    assert [each.num_trajectories for each in collate([trees[0][0], trees[0], Tree(), forest], merges=False)] == [
        1,
        len(trees[0]),
        len(trees[1]),
        len(trees[1]),
    ]
    with pytest.raises(DataError, match="a dataset item is a dict"):
        collate([{"input_ids": [1]}], merges=False)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_batches_of_all_ranks_are_every_tree_once_per_epoch(num_ranks):
    samplers = [TreeSampler(11, 2, seed=5, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    orders = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = list(zip(*samplers, strict=True))
        order = [tree for step in batches for batch in step for tree in batch]
        assert sorted(order) == list(range(11))
        orders.append(order)
    assert orders[0] != orders[1]


def test_the_order_depends_on_seed_and_epoch_alone():
    first, again = (TreeSampler(100, 4, seed=1) for _ in range(2))
    np.random.random(3)  # noqa: NPY002 - moves the global generator on
    assert list(first) == list(again) != list(TreeSampler(100, 4, seed=2))


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_an_epoch_trains_every_tree_once(make_trainer, trees, accumulation):
    trainer = make_trainer(
        trees, num_train_epochs=2, gradient_accumulation_steps=accumulation, merge_across_trees=False
    )
    trained = []
    step = trainer.engine.step
    trainer.engine.step = lambda forests, *args, **kwargs: (trained.extend(forests), step(forests, *args, **kwargs))[1]
    trainer.train()
    names = [forest.trajectories[0].source for forest in trained]
    assert sorted(names[:7]) == sorted(names[7:]) == [f"rows.jsonl:{tree}" for tree in range(7)]


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_evaluation_is_the_token_mean_of_the_set_at_any_batch_size(make_trainer, trees, reference, batch_size):
    trainer = make_trainer(trees, eval_dataset=trees, per_device_eval_batch_size=batch_size)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(reference[1], rel=1e-6)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_several_evaluation_sets_have_names(make_trainer, trees):
    metrics = make_trainer(trees, eval_dataset={"a": trees[:2], "b": trees[2:]}).evaluate()
    assert {"eval_a_loss", "eval_b_loss"} <= set(metrics)


def test_logs_tell_throughput_and_ratio(make_trainer, trees):
    trainer = make_trainer(trees, max_steps=4, logging_steps=2)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["step"] == 2
    assert entry["share_ratio"] > 1
    assert entry["tokens_per_second_flat"] > entry["tokens_per_second_tree"] > 0
    assert {"loss", "grad_norm", "learning_rate", "tree_tokens"} <= set(entry)
    assert entry["memory_bytes"] > 2**20


def test_derived_numbers_are_printed_before_the_first_step(make_trainer, trees, capsys):
    make_trainer(trees, max_steps=3, max_tokens=32, gradient_accumulation_steps=2).train()
    text = capsys.readouterr().out
    facts = survey(trees)
    for expected in ("trees            7", f"{facts.num_tree_tokens:,}", "3 of 4 trees", "32 tokens", "micro-batches"):
        assert expected in text
    assert text.index("share ratio") < text.index("'loss'")


def test_training_learns(make_trainer, trees):
    trainer = make_trainer(trees, max_steps=30, per_device_train_batch_size=7)
    trainer.train()
    assert losses(trainer)[-1] < 0.7 * losses(trainer)[0]


def test_mixed_precision_keeps_float32_parameters(make_trainer, trees, reference):
    gradients, loss = gradients_of_step(make_trainer, trees, per_device_train_batch_size=7, bf16=True)
    expected, expected_loss = reference
    assert gradients.dtype == torch.float32
    assert loss == pytest.approx(expected_loss, rel=1e-2)
    assert float((gradients - expected).norm() / expected.norm()) < 3e-2


def test_activation_checkpointing_changes_nothing(make_trainer, trees, reference):
    known = TreeTrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    settings = {name: True, "per_device_train_batch_size": 7, "max_tokens": 40}
    gradients, _ = gradients_of_step(make_trainer, trees, **settings)
    assert float((gradients - reference[0]).norm() / reference[0].norm()) < 2e-6


def test_a_gradient_that_is_not_finite_is_not_applied(make_trainer, trees):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            model.lm_head.weight.data[5, 0] = float("nan")
            self.norm = model.model.norm.weight.clone()

    breaks = Break()
    trainer = make_trainer(trees, max_steps=3, callbacks=[breaks])
    with pytest.raises(FloatingPointError, match=r"step 2 is not finite.*rows\.jsonl:\d"):
        trainer.train()
    assert torch.equal(breaks.norm, trainer.model.model.norm.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16": True}, "fp16=True cannot be used: .* use bf16"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"dataloader_drop_last": True}, "no tree is dropped"),
        ({"max_tokens": 0}, "max_tokens=0; give a positive"),
        ({"attention": "flash"}, "attention='flash' is unknown"),
        ({"weighting": "twice"}, "weighting='twice' is unknown"),
        ({"normalization": "constant"}, "constant"),
        ({"train_sampling_strategy": "group_by_length"}, "choose random or sequential"),
        ({"per_device_train_batch_size": 0}, "must be at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_hold_on_trees_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        TreeTrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, **settings)


def test_an_empty_data_set_is_refused(make_trainer):
    with pytest.raises(ConfigError, match="train_dataset is empty"):
        make_trainer([])


def test_logs_tell_the_flop_bound_and_a_lower_bound_of_efficiency(make_trainer, trees):
    trainer = make_trainer(trees, max_steps=1, per_device_train_batch_size=7, merge_across_trees=False)
    trainer.train()
    entry = trainer.state.log_history[0]
    costs = flop_model(trainer.model)
    forests = [Forest.from_trajectories(tree) for tree in trees]
    needed = sum(costs.tree(each) for each in forests)
    assert entry["flop_bound"] == pytest.approx(sum(costs.flat(each) for each in forests) / needed, rel=1e-3)
    assert trainer.state.total_flos == pytest.approx(needed)
    seconds = entry["tree_tokens"] / entry["tokens_per_second_tree"]
    fastest = metrics.matmul_flops("cpu", torch.float32)
    assert entry["efficiency_at_least"] == pytest.approx(needed / seconds / fastest, rel=0.1)
    assert 0 < entry["efficiency_at_least"] < 1


def test_a_model_of_unknown_shapes_has_no_efficiency(make_trainer, trees, monkeypatch):
    def unknown(model):
        raise AttributeError("num_attention_heads")

    monkeypatch.setattr(metrics, "flop_model", unknown)
    trainer = make_trainer(trees, max_steps=1)
    trainer.train()
    assert not {"flop_bound", "efficiency_at_least"} & set(trainer.state.log_history[0])
    assert trainer.state.total_flos > 0
