"""What only the order and the reads of a walk decide: gaps between the rows that are read, passes beside other ranks."""

import numpy as np
import pytest
import torch

from treewise import Forest, Trajectory, TreeEngine, plan
from treewise.distributed.lockstep import training_passes
from treewise.engine.rank_guests import DONE
from treewise.planning.layout import lay_out
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of


@pytest.mark.parametrize("attention", ["cascade", "reference"])
def test_a_micro_batch_skips_the_branches_beside_it(attention: str) -> None:
    """Two branches are open in one micro-batch; what is below the second reads the trunk and the second alone."""
    rng = np.random.default_rng(0)
    items = [
        Trajectory([3, 4, 5, 6, branch, 7, leaf, *rng.integers(3, 64, 3)]) for branch in (10, 20) for leaf in (30, 40)
    ]
    forest = Forest.from_trajectories(items)
    made = plan(forest, 8, hold="never")
    assert [[rows.tolist() for _, rows in lay_out(made, each).gateway] for each in range(3)] == [
        [],
        [[0, 1, 2, 3, 4, 5]],
        [[0, 1, 2, 3, 6, 7]],
    ]
    model = tiny_model("gpt_neox", torch.float64)
    loss, logprobs, expected = flat_sft(model, items)
    engine = TreeEngine(model, 8, attention, hold="never", check=False)
    model.zero_grad()
    assert engine.step(forest).loss == pytest.approx(loss, rel=1e-10)
    assert gradient_error(gradients_of(model), expected) < 1e-10
    with torch.no_grad():
        for found, each in zip(engine.logprobs(forest), logprobs, strict=True):
            torch.testing.assert_close(found, each.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("hold", ["never", "always"])
def test_a_rank_without_work_runs_the_passes_of_the_others(hold: str) -> None:
    """Layers of shards gather their weights in every forward and backward, so each of them needs its counterpart."""
    rng = np.random.default_rng(1)
    items = [Trajectory([3, 4, 5, 6, 7, 8, *rng.integers(9, 64, 9)]) for _ in range(3)]
    forest = Forest.from_trajectories(items)
    model, events = tiny_model(), []
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda *_: events.append("graph" if torch.is_grad_enabled() else "forward"))
    layer.register_full_backward_hook(lambda *_: events.append("backward"))
    engine = TreeEngine(model, 24 if hold == "always" else 10, hold=hold, check=False)
    engine.step(forest)
    own, text = events.copy(), training_passes(engine.plan(forest)).text
    assert {"never": "forward", "always": "graph"}[hold] == own[0]
    assert own.count("graph") == own.count("backward") > 1
    events.clear()
    answers = iter([[DONE, text], [DONE, DONE]])
    idle = TreeEngine(model, check=False)
    idle.enable_lockstep(lambda _: next(answers))
    idle.drain()
    assert events == own
