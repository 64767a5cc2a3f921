"""What gateways keep of recurrent layers is counted where the budget is chosen."""

import numpy as np
import pytest
from hypothesis import given, settings

from tests.nn.recurrent.hybrids import hybrid
from treewise import Forest, Trajectory, TreeEngine
from treewise.engine.budget import gateway_token_bytes
from treewise.nn.model import split_model
from treewise.nn.recurrent import peak_cuts, state_bytes
from treewise.nn.recurrent.segments import row_segments
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing.strategies import forests_and_budgets


def test_bytes_of_a_cut_are_those_of_states_and_tails() -> None:
    lm = split_model(hybrid("qwen3_next"))
    state, tail = 4 * 8 * 8, 3 * (2 * 2 * 8 + 4 * 8)  # heads, keys, values; three tokens of queries, keys and values
    num_layers, value_and_gradient = 2, 4 + 4
    assert state_bytes(lm) == num_layers * value_and_gradient * (state + tail)
    assert state_bytes(split_model(hybrid("minimax"))) == 2 * 8 * (4 * 8 * 8)


def test_models_without_attention_have_gateways_of_states_only() -> None:
    lm = split_model(hybrid("mamba2"))
    assert gateway_token_bytes(lm) == 1
    assert state_bytes(lm) > 0


@settings(max_examples=3 * settings().max_examples)
@given(forests_and_budgets())
def test_most_cuts_alive(given) -> None:
    forest, budget = given
    run = plan(forest, budget)
    alive, most = {}, 0
    for step in run.schedule:
        if step.action in ("forward", "hold"):
            segments = row_segments(run, step.micro_batch, lay_out(run, step.micro_batch))
            alive[step.micro_batch] = len(segments.cuts)
        most = max(most, sum(alive.values()))
        if step.action in ("train", "backward"):
            alive.pop(step.micro_batch, None)
    assert peak_cuts(run) == most


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_a_measured_budget(family: str) -> None:
    rng = np.random.default_rng(0)
    engine = TreeEngine(hybrid(family), "auto", reserve_bytes=0)
    out = engine.step(Forest.from_trajectories([Trajectory(rng.integers(3, 64, 40)) for _ in range(3)]))
    assert engine.max_tokens >= 128
    assert np.isfinite(out.loss)
