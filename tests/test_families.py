"""Every family: loss, log-probs and gradients of trees equal flat training, whole and partitioned."""

import numpy as np
import pytest

from families import FAMILIES, tiny_model
from oracle import flat_sft, gradient_error, gradients_of
from treewise import Forest, Trajectory, TreeEngine

# float32 sums in another order: 24 bits give 6e-8 per operation; independent flat runs differ by 1e-7 to 6e-7 here.
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    """Forks, a contained prefix, a duplicate, a second tree; longer than every window and chunk of the tiny models."""
    rng = np.random.default_rng(0)
    base = rng.integers(3, 64, 8)
    items = []
    for _ in range(6):
        ids = np.concatenate([base[: rng.integers(2, 9)], rng.integers(3, 6, rng.integers(1, 14))])
        weights = (rng.random(len(ids)) < 0.6) * rng.random(len(ids))
        weights[0], weights[-1] = 0, 1
        items.append(Trajectory(ids, loss_weights=weights))
    return [*items, Trajectory(items[0].token_ids[:-1]), items[1], Trajectory(rng.integers(3, 64, 7))]


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_equals_flat(family: str, trajectories: list[Trajectory]) -> None:
    model = tiny_model(family)
    flat_loss, flat_logprobs, flat_gradients = flat_sft(model, trajectories)
    forest = Forest.from_trajectories(trajectories)
    for attention, max_tokens in (("reference", None), ("auto", None), ("auto", 17), ("reference", 5)):
        model.zero_grad()
        engine = TreeEngine(model, max_tokens, attention)
        assert engine.step(forest).loss == pytest.approx(flat_loss, rel=TOLERANCE)
        assert gradient_error(gradients_of(model), flat_gradients) < TOLERANCE, (attention, max_tokens)
        for found, expected in zip(engine.logprobs(forest), flat_logprobs, strict=True):
            np.testing.assert_allclose(found.detach(), expected, atol=2e-5)
