"""Batches with a `StepRunner` alone, without a trainer."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.trainer.helpers import flat_loss, tiny_model
from treewise.errors import DataError
from treewise.objectives import GSPO, SFT
from treewise.testing.families import tiny_model as family_model
from treewise.testing.oracle import gradient_error, gradients_of
from treewise.trainer import TreeTrainingArguments
from treewise.trainer.step import StepRunner, optimizer_bytes
from treewise.tree.forest import Forest


@pytest.fixture
def forests(trees):
    return [Forest.from_trajectories(tree) for tree in trees]


@pytest.fixture
def make_runner(tmp_path, forests):
    def make(model, **settings):
        args = TreeTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **settings)
        return StepRunner(model, args.objective(), args, lambda: forests[0])

    return make


def test_a_batch_has_the_flat_loss_and_gradients(make_runner, trees, forests):
    model, reference = tiny_model(), tiny_model()
    expected = flat_loss(reference, [item for tree in trees for item in tree])
    expected.backward()
    runner = make_runner(model, max_tokens=40)
    denominator = runner.denominator([forests], 1)
    losses = [runner.train_batch(part, denominator, 1).loss for part in (forests[:3], forests[3:])]
    runner.sum_gradients()  # of one rank: nothing to add
    assert sum(losses) == pytest.approx(float(expected.detach()), rel=1e-6)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)
    assert runner.evaluate_batch(forests, SFT(), 1) / denominator == pytest.approx(float(expected.detach()), rel=1e-6)
    assert not runner.is_sharded


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [None, 14])
@pytest.mark.parametrize("objective", ["sft", "gspo"])
def test_router_losses_belong_to_the_step_however_it_is_cut(make_runner, trees, objective, max_tokens, num_parts):
    for tree in trees:
        for index, item in enumerate(tree):
            old_logprobs = np.full(len(item.token_ids), -4.0)
            advantages = np.full(len(item.token_ids), 1.0 - 2.0 * (index % 2))
            changes = {"token_ids": item.token_ids % 60, "advantages": advantages, "old_logprobs": old_logprobs}
            tree[index] = dataclasses.replace(item, **changes)
    forests = [Forest.from_trajectories(tree) for tree in trees]
    model = family_model(
        "mixtral", router_aux_loss_coef=0.7, output_router_logits=True, pad_token_id=None, vocab_size=64
    )
    runner = make_runner(model, max_tokens=max_tokens, router_z_coefficient=0.1)
    if objective == "gspo":  # takes two walks
        runner.objective = GSPO()
    denominator = runner.denominator([forests], 1)
    whole = runner.engine.step(forests, runner.objective, denominator=denominator)
    expected = gradients_of(model)
    model.zero_grad()
    batches = [forests[part::num_parts] for part in range(num_parts)]
    runner.count_experts(batches, 1)
    losses = [runner.train_batch(batch, denominator, 1).loss for batch in batches]
    assert sum(losses) == pytest.approx(whole.loss, rel=1e-6)
    assert gradient_error(gradients_of(model), expected) < 1e-6


def test_a_batch_without_a_trained_token_computes_nothing(make_runner, forests):
    runner = make_runner(tiny_model(), max_tokens=40)
    for forest in forests:
        for item in forest.trajectories:
            item.loss_weights[:] = 0
    assert runner.train_batch(forests, 1.0, 1) is None
    with pytest.raises(DataError, match=r"step 4 has no trained token; leave these trees out: rows.jsonl:0"):
        runner.denominator([forests], 4)


@pytest.mark.parametrize(("setting", "expected"), [("auto", 17), (40, 40)])
def test_a_resumed_budget_replaces_a_measurement_alone(make_runner, setting, expected):
    runner = make_runner(tiny_model(), max_tokens=setting)
    runner.resume_budget(17)
    assert runner.engine.max_tokens == expected


def test_trajectories_that_are_not_finite_are_found_one_by_one(make_runner, trees, forests):
    model = tiny_model()
    bad = int(trees[2][0].token_ids[-2])
    model.model.embed_tokens.weight.data[bad] = float("nan")
    named = make_runner(model, max_tokens=40).nonfinite_trajectories(forests)
    assert named == [item.source for tree in trees for item in tree if bad in item.token_ids]


def test_an_optimizer_that_has_not_run_needs_two_moments():
    model = tiny_model()
    num_bytes = 8 * sum(each.numel() for each in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    assert optimizer_bytes(model, None) == optimizer_bytes(model, optimizer) == num_bytes
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    assert optimizer_bytes(model, optimizer) == 0
