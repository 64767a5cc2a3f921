"""Norms of single trees against transformers alone."""

import pytest
import torch

from treewise import TreeEngine
from treewise.rl.curriculum.gradient_norms import gradient_norms
from treewise.testing import tiny_model
from treewise.tree.trajectory import Trajectory


def test_norms_are_those_of_each_tree_alone():
    model = tiny_model(vocab_size=16).train()
    trees = [[Trajectory([1, 2, 3, 4]), Trajectory([1, 2, 5])], [Trajectory([7, 8, 9])]]
    before = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = before.clone()
    found = gradient_norms(TreeEngine(model, 3), trees, None)
    assert torch.equal(model.lm_head.weight.grad, before)
    assert model.training
    for tree, norm in zip(trees, found, strict=True):
        model.zero_grad()
        total, count = torch.zeros(()), 0
        for row in tree:
            ids = torch.tensor([row.token_ids.tolist()])
            total = total + model(ids, labels=ids).loss * (len(row) - 1)
            count += len(row) - 1
        (total / count).backward()
        expected = sum(float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None) ** 0.5
        assert norm == pytest.approx(expected, rel=1e-4)
