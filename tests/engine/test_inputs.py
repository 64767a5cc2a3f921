"""What the engine takes: everything that TreeTrainer takes, with the same loss and gradients."""

import numpy as np
import pytest
import torch

from treewise import SFT, Forest, Trajectory, TreeEngine
from treewise.data import load_trees
from treewise.errors import ConfigError, DataError
from treewise.testing import tiny_model
from treewise.testing.oracle import flat_logprobs, flat_loss, gradient_error, gradients_of

MODEL = tiny_model("llama", num_hidden_layers=2)
ITEMS = [Trajectory([1, 5, 9, 3 + i, 7], [0, 0, 1, 1, i % 2]) for i in range(3)]
ROWS = [{"token_ids": item.token_ids.tolist(), "loss_weights": item.loss_weights.tolist()} for item in ITEMS]
INPUTS = {
    "trajectories": lambda: ITEMS,
    "forests": lambda: [Forest.from_trajectories(ITEMS[:2]), Forest.from_trajectories(ITEMS[2:])],
    "lists": lambda: [ITEMS[:1], ITEMS[1:]],
    "mixed": lambda: [ITEMS[0], ITEMS[1:2], Forest.from_trajectories(ITEMS[2:])],
    "trees": lambda: load_trees(ROWS),
    "tree": lambda: load_trees([{**row, "group": "one"} for row in ROWS])[0],
    "iterator": lambda: iter(ITEMS),
}


def stepped(engine, data, *objective, **settings):
    MODEL.zero_grad()
    return engine.step(data, *objective, **settings).loss, gradients_of(MODEL)


@pytest.mark.parametrize("name", INPUTS)
def test_a_step_is_the_same_on_every_input(name):
    engine = TreeEngine(MODEL)
    loss, gradients = stepped(engine, Forest.from_trajectories(ITEMS))
    other, same = stepped(engine, INPUTS[name]())
    assert other == pytest.approx(loss, rel=1e-6)
    assert gradient_error(same, gradients) < 1e-5
    assert len(engine.logprobs(INPUTS[name]())) == 3


@pytest.mark.parametrize("data", [3, [3], [], None])
def test_anything_else_is_an_error(data):
    with pytest.raises(DataError):
        TreeEngine(MODEL).step(data)


@pytest.mark.parametrize("budget", [None, 4])
def test_trained_only_leaves_out_what_no_trajectory_trains(budget):
    engine = TreeEngine(MODEL, budget)
    expected = [flat_logprobs(MODEL, item)[item.loss_weights[1:] > 0] for item in ITEMS]
    for ours, theirs in zip(engine.logprobs(ITEMS, trained_only=True), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def loss(logprobs):
        return sum(part.square().sum() for part in logprobs)

    masks = [torch.from_numpy(np.asarray(item.loss_weights[1:] > 0)) for item in ITEMS]
    flat, gradients = flat_loss(
        MODEL, ITEMS, lambda logprobs: loss([part[mask] for part, mask in zip(logprobs, masks, strict=True)])
    )
    value, ours = stepped(engine, ITEMS, loss, trained_only=True)
    assert value == pytest.approx(flat, rel=1e-5)
    assert gradient_error(ours, gradients) < gradients.tolerance


def test_trained_only_is_for_functions():
    with pytest.raises(ConfigError, match="loss function"):
        TreeEngine(MODEL).step(ITEMS, SFT(), trained_only=True)


def test_objects_are_printed_in_a_line():
    assert repr(TreeEngine(MODEL, 8)) == "TreeEngine(LlamaForCausalLM, max_tokens=8, attention='auto')"
    assert repr(ITEMS[0]) == "Trajectory(5 tokens, 2 trained)"
    full = Trajectory([1, 2, 3], old_logprobs=[0, -1, -1], group="g", reward=0.5)
    assert repr(full) == "Trajectory(3 tokens, 2 trained, old_logprobs, group='g', reward=0.5)"
    out = TreeEngine(MODEL).step(ITEMS, SFT())
    assert repr(out).startswith(f"StepOutput(loss {out.loss:.6g}, {out.num_trained_tokens} trained tokens, ")
    assert repr(out).endswith(" flat tokens, 1 micro-batch)")
