"""Walks in step with other ranks: gradients and log-probs as alone, whatever the others run and in whatever order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treewise import SFT, Forest, Trajectory, TreeEngine
from treewise.distributed.lockstep import forward_passes, training_passes
from treewise.distributed.lockstep.guest import DONE
from treewise.errors import ConfigError
from treewise.planning.planner import plan
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of
from treewise.testing.strategies import budgets, forests_and_budgets, trajectories

MODEL = tiny_model("llama", num_hidden_layers=2)
# The embedding of token 0, the padding, is zero, and so is everything that follows from it alone.
WITHOUT_PADDING = trajectories(vocab_size=5).map(lambda items: [Trajectory(item.token_ids + 1) for item in items])


def in_lockstep(max_tokens, other):
    """An engine beside a second rank, which runs `other` in its only walk; and the texts that this rank sent."""
    engine = TreeEngine(MODEL, max_tokens, "reference", check=False)
    sent = []

    def exchange(text):
        sent.append(text)
        return [text, other if len(sent) == 1 else DONE]

    engine.enable_lockstep(exchange)
    return engine, sent


@given(data=st.data(), items=WITHOUT_PADDING, other=forests_and_budgets())
def test_gradients_beside_any_other_rank(data, items, other):
    forest = Forest.from_trajectories(items)
    expected_loss, _, expected = flat_sft(MODEL, items)
    engine, sent = in_lockstep(data.draw(budgets(forest)), training_passes(plan(*other)).text)
    MODEL.zero_grad()
    loss = engine.step(forest, SFT()).loss
    engine.drain()
    assert sent[-1] == DONE
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradient_error(gradients_of(MODEL), expected) < expected.tolerance


@given(data=st.data(), items=WITHOUT_PADDING, other=forests_and_budgets())
def test_log_probs_beside_any_other_rank(data, items, other):
    forest = Forest.from_trajectories(items)
    _, expected, _ = flat_sft(MODEL, items)
    engine, _ = in_lockstep(data.draw(budgets(forest)), forward_passes(plan(*other)).text)
    with torch.no_grad():
        found = engine.logprobs(forest)
    engine.drain()
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_a_rank_without_work_runs_empty_passes_and_gets_no_gradient():
    made = plan(Forest.from_trajectories([Trajectory(range(1, 40))]), 8)
    engine, sent = in_lockstep(8, training_passes(made).text)
    MODEL.zero_grad()
    engine.drain()
    assert sent == [DONE, DONE]
    assert all(float(each.abs().max()) == 0 for each in gradients_of(MODEL).values())


def test_values_with_gradients_in_lockstep_are_an_error_that_names_the_way_out():
    engine, _ = in_lockstep(None, DONE)
    forest = Forest.from_trajectories([Trajectory(range(1, 9))])
    with pytest.raises(ConfigError, match=r"give the loss to engine\.step as a function, or use torch\.no_grad"):
        engine.logprobs(forest)
