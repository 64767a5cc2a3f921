"""Angle concentration against O(m^2) cosines of every prompt alone; norms of single trees against transformers."""

import numpy as np
import pytest
import torch

from treewise import TreeEngine
from treewise.errors import DataError
from treewise.experimental.gain.signals import angles_of, gradient_norms, num_shared_tokens
from treewise.testing import tiny_model
from treewise.tree.trajectory import Trajectory

PREFIX = [3, 1, 4, 1, 5, 9]
PROMPTS = [[*PREFIX, *rest] for rest in ([2, 6, 5], [2, 6, 7, 8], [2, 6], [7], [7, 7, 7, 7, 7, 7, 7], [2, 6, 5])]


def naive(model, prompt, n):
    with torch.no_grad():
        hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0].double()
    m, intra, inter = len(prompt), 0.0, 0.0
    for i in range(n, m):
        for j in range(m):
            cosine = float(torch.nn.functional.cosine_similarity(hidden[i], hidden[j], dim=0))
            intra += cosine if j >= n else 0.0
            inter += cosine if j < n else 0.0
    return intra / (m - n) ** 2, inter / ((m - n) * n) if n else 0.0


@pytest.mark.parametrize("max_tokens", [None, 4])
@pytest.mark.parametrize("num_shared", [None, 2, 0])
def test_angles_are_means_of_cosines(max_tokens, num_shared):
    model = tiny_model(vocab_size=16)
    model.train()
    found = angles_of(TreeEngine(model, max_tokens), PROMPTS, num_shared)
    n = 6 if num_shared is None else num_shared
    expected = np.array([naive(model, prompt, n) for prompt in PROMPTS]).T
    assert found.num_shared == n
    np.testing.assert_allclose([found.intra, found.inter], expected, atol=1e-5)
    np.testing.assert_allclose(found.total, expected.sum(0), atol=1e-5)
    assert model.training
    assert all(each.grad is None for each in model.parameters())


def test_a_shared_prefix_is_computed_once():
    engine = TreeEngine(tiny_model(vocab_size=16), check=False)
    sizes = []
    engine.lm.model.get_input_embeddings().register_forward_hook(lambda _m, ids, _o: sizes.append(ids[0].numel()))
    angles_of(engine, PROMPTS)
    assert sum(sizes) == len(PREFIX) + 2 + 1 + 2 + 7  # 2 6 (5 | 7 8), 7 (7 7 7 7 7 7)


def test_the_prefix_leaves_every_prompt_a_token():
    assert num_shared_tokens([[1, 2, 3], [1, 2, 3, 4]]) == 2
    assert num_shared_tokens([[1, 2]]) == 1
    assert num_shared_tokens([[1], [1, 2]]) == 0
    assert num_shared_tokens([[5, 2], [1, 2]]) == 0


def test_rows_without_a_direction_are_refused():
    model = tiny_model(vocab_size=16)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    with pytest.raises(DataError, match="zero or not finite"):
        angles_of(TreeEngine(model, check=False), PROMPTS)


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
