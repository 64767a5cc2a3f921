"""Losses of rows with coefficients of their own, on a tree against each row alone; what a row may hold. Through the
Tinker API, with adapters, every setting and a flat oracle: tests/serve/test_wire.py."""

import numpy as np
import pytest
import torch

from treewise.engine.engine import TreeEngine
from treewise.errors import DataError
from treewise.serve.rows_loss import INPUTS, RowsLoss, make_row
from treewise.testing.families import tiny_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


def rows_of(loss):
    """Seven rows of one tree, two of them the same tokens with other coefficients; a target is missing in each."""
    rng, first = np.random.default_rng(4), np.random.default_rng(5).integers(0, 64, 9)
    rows = []
    for end, more in ((9, 4), (9, 2), (5, 6), (9, 0), (9, 0), (3, 0), (7, 3)):
        ids = np.concatenate([first[:end], rng.integers(0, 64, more)])
        given = {name: rng.normal(-4.0 if name == "logprobs" else 0.0, 0.4, len(ids) - 1) for name in INPUTS[loss]}
        targets = ids[1:].copy()
        targets[1] = -1
        rows.append(make_row(ids[:-1], {"target_tokens": targets, **given}, loss, {}))
    return rows


@pytest.mark.parametrize("loss", INPUTS)
@pytest.mark.parametrize("max_tokens", [None, 8])
def test_a_tree_gives_the_losses_and_gradients_of_rows_alone(loss, max_tokens):
    rows, found = rows_of(loss), {}
    for name, groups in {"tree": [rows], "alone": [[row] for row in rows]}.items():
        model, parts = tiny_model("llama").double(), []
        engine = TreeEngine(model, max_tokens if name == "tree" else None)
        for group in groups:
            forest, own = Forest.from_trajectories([Trajectory(row.token_ids) for row in group]), RowsLoss(group)
            engine.step([forest], own)
            parts.append(own)
            assert own.num_new.sum() == forest.num_tokens
        gradient = torch.cat([each.grad.ravel() for each in model.parameters()])
        streams = (np.concatenate([getattr(own, key) for own in parts]) for key in ("losses", "logprobs"))
        found[name] = gradient, *streams
    assert (found["tree"][0] - found["alone"][0]).norm() < 1e-6 * found["alone"][0].norm()
    for tree, alone in zip(found["tree"][1:], found["alone"][1:], strict=True):
        assert np.abs(tree - alone).max() < 1e-5
        assert np.abs(tree).max() > 0.1


@pytest.mark.parametrize(
    ("loss", "inputs", "settings", "says"),
    [
        ("pppo", {}, {}, "Did you mean 'ppo'"),
        ("ppo", {"advantages": np.zeros(3)}, {}, "lacks loss_fn_inputs logprobs"),
        ("cross_entropy", {"weights": np.zeros(3), "mask": np.zeros(3)}, {}, "has loss_fn_inputs mask"),
        ("cross_entropy", {"weights": np.zeros(2)}, {}, "weights has shape"),
        ("cross_entropy", {"weights": np.array([1, np.nan, 0])}, {}, "not finite"),
        ("dro", {"logprobs": np.zeros(3), "advantages": np.zeros(3)}, {"bta": 1.0}, "Did you mean 'beta'"),
        ("cross_entropy", {"target_tokens": np.array([1.5, np.nan, 2])}, {}, "target_tokens holds float64"),
    ],
)
def test_wrong_data_are_named(loss, inputs, settings, says):
    with pytest.raises(DataError, match=says):
        make_row(np.arange(3), {"target_tokens": np.arange(3), **inputs}, loss, settings)


@pytest.mark.parametrize("max_tokens", [None, 3])
@pytest.mark.parametrize("loss", INPUTS)
def test_rows_without_a_target_have_no_loss(loss, max_tokens):
    """As beside rows that have some."""
    given = {name: np.ones(3) for name in INPUTS[loss]}
    rows = [
        make_row(np.arange(first, first + 3), {"target_tokens": np.full(3, -1), **given}, loss, {}) for first in (0, 9)
    ]
    own, model = RowsLoss(rows), tiny_model("llama")
    forest = Forest.from_trajectories([Trajectory(row.token_ids) for row in rows])
    out = TreeEngine(model, max_tokens).step([forest], own)
    assert (out.loss, own.losses.any(), own.logprobs.any()) == (0.0, False, False)
    assert not any(each.grad is not None and each.grad.any() for each in model.parameters())


def test_the_gap_to_the_sampler_is_over_targets_with_an_advantage():
    given = {
        "target_tokens": np.array([5, 6, 7]),
        "logprobs": np.full(3, -1.0),
        "advantages": np.array([1.0, 0.0, 1.0]),
    }
    loss = RowsLoss([make_row(np.array([1, 2, 3]), given, "importance_sampling", {})])
    loss.logprobs[:] = -1, -9, -1
    assert loss.sampler_gap(0) == 1
