"""Budgets: measured from memory, and smaller after an out-of-memory error, with the same result."""

import logging

import numpy as np
import pytest
import torch

from treewise import Forest, Trajectory, TreeEngine
from treewise.engine import checks, step
from treewise.engine.budget import CALIBRATION_TOKENS, MAX_TOKENS, TokenBytes, choose_budget, measure_token_bytes
from treewise.errors import ConfigError, OutOfMemoryError
from treewise.nn.attention.flex import BLOCK_SIZE, MIN_BLOCKS
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of


@pytest.fixture
def rollouts() -> list[Trajectory]:
    rng = np.random.default_rng(1)
    prompt = rng.integers(3, 64, 9)
    return [Trajectory(np.concatenate([prompt, rng.integers(3, 64, 8)])) for _ in range(6)]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes every forward of more than 20 tokens run out of memory; records the sizes of those that ran."""
    ran: list[int] = []
    plain = step.run_decoder

    def limited(lm, token_ids, *args, **kwargs):
        if len(token_ids) > 20:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: no.")
        ran.append(len(token_ids))
        return plain(lm, token_ids, *args, **kwargs)

    monkeypatch.setattr(step, "run_decoder", limited)
    monkeypatch.setattr(checks, "probe", lambda *args, **kwargs: None)  # of more tokens
    return ran


def test_a_step_that_runs_out_of_memory_runs_again_with_the_same_result(rollouts, memory, caplog) -> None:
    model = tiny_model()
    loss, _, expected = flat_sft(model, rollouts)
    model.zero_grad(set_to_none=True)
    engine = TreeEngine(model)
    with caplog.at_level(logging.WARNING, "treewise"):
        out = engine.step(Forest.from_trajectories(rollouts))
    assert out.loss == pytest.approx(loss, rel=expected.tolerance)
    assert gradient_error(gradients_of(model), expected) < expected.tolerance
    assert engine.max_tokens == 57 // 2
    assert max(memory) <= 20
    assert "the same step again" in caplog.text


def test_what_was_added_before_memory_ran_out_is_dropped(rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, has_failed = tiny_model(), step.run_decoder, []
    _, _, expected = flat_sft(model, rollouts)
    model.zero_grad(set_to_none=True)

    def once(*args, **kwargs):
        if not has_failed and model.model.norm.weight.grad is not None:
            has_failed.append(True)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: no.")
        return plain(*args, **kwargs)

    monkeypatch.setattr(step, "run_decoder", once)
    TreeEngine(model, 24, check=False).step(Forest.from_trajectories(rollouts))
    assert has_failed
    assert gradient_error(gradients_of(model), expected) < expected.tolerance


def test_auto_keeps_the_gradients_of_earlier_calls(rollouts, memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALIBRATION_TOKENS, "cpu", (8, 16))
    model = tiny_model()
    _, _, expected = flat_sft(model, rollouts)
    model.zero_grad(set_to_none=True)
    forest, denominator = Forest.from_trajectories(rollouts), 6 * 16.0
    halves = [Forest.from_trajectories(rollouts[:2]), Forest.from_trajectories(rollouts[2:])]
    engine = TreeEngine(model, "auto")
    for half in halves:
        engine.step(half, denominator=denominator)
    assert gradient_error(gradients_of(model), expected) < expected.tolerance
    assert max(memory) <= 20 < forest.num_tokens


def test_a_given_budget_says_that_the_gradients_are_half_made(rollouts, memory) -> None:
    model = tiny_model()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(OutOfMemoryError, match="Zero it, lower max_tokens"):
        TreeEngine(model, 40).step(Forest.from_trajectories(rollouts))


def test_other_errors_are_not_taken_for_memory(rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(step, "run_decoder", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        TreeEngine(tiny_model(), check=False).step(Forest.from_trajectories(rollouts))


def test_auto_measures_and_leaves_gradients_alone(rollouts) -> None:
    model = tiny_model()
    _, _, expected = flat_sft(model, rollouts)
    engine = TreeEngine(model, "auto")
    before = gradients_of(model)
    engine.plan(Forest.from_trajectories(rollouts))
    assert engine.max_tokens == MAX_TOKENS["cpu"]  # a tiny model fits many tokens
    assert gradient_error(gradients_of(model), before) == 0
    model.zero_grad()
    engine.step(Forest.from_trajectories(rollouts))
    assert gradient_error(gradients_of(model), expected) < expected.tolerance


def test_auto_measures_a_model_with_fewer_positions_than_it_measures_with() -> None:
    row = Trajectory(list(range(3, 43)))
    model = tiny_model("gpt2", n_positions=40)
    engine = TreeEngine(model, "auto")
    engine.step(row)
    assert engine.max_tokens == MAX_TOKENS["cpu"]


def test_auto_scores_with_a_model_that_is_not_trained_and_measures_when_it_is(rollouts) -> None:
    model = tiny_model()
    wanted = [each.old_logprobs for each in TreeEngine(model, None).scored(rollouts)]
    model.requires_grad_(False)
    engine = TreeEngine(model, "auto")
    for found, each in zip(engine.scored(rollouts), wanted, strict=True):
        assert found.old_logprobs == pytest.approx(each, abs=1e-6)
    assert (engine.max_tokens, engine.budget.is_measured) == (MAX_TOKENS["cpu"], False)
    model.requires_grad_(True)
    engine.step(rollouts)
    assert engine.budget.is_measured


def test_bytes_per_token_count_what_autograd_keeps() -> None:
    """Two linear layers without bias: the input of each is kept, 16 and 32 float32 values a token."""
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 4, bias=False))

    def run(num_tokens: int) -> None:
        layers(torch.randn(num_tokens, 16, requires_grad=True)).sum().backward()

    sizes = []

    def noted(num_tokens: int) -> None:
        sizes.append((num_tokens, max(MIN_BLOCKS, -(-num_tokens // BLOCK_SIZE)) * BLOCK_SIZE))
        run(num_tokens)

    measured = measure_token_bytes(noted, num_layers=2, gateway=7, device_type="cuda")
    assert measured == TokenBytes(activation=int((16 + 32) * 4 * 1.25), gateway=7)
    assert all(given == filled_up for given, filled_up in sizes)  # what FlexAttention fills up grows in step


def test_the_budget_leaves_room_for_gateways() -> None:
    cost = TokenBytes(activation=1000, gateway=100)
    free = 2_000_000  # 60 % of it: 1,200 tokens
    assert choose_budget(cost, free, "cpu", lambda budget: 0) == 1200
    assert choose_budget(cost, free, "cpu", lambda budget: 5000) == 675
    # Gateways fit at no budget: 5.001 MB are needed at one token, an eighth more at 626.
    assert choose_budget(cost, free, "cpu", lambda budget: 50_000) == 594
    assert choose_budget(cost, 10**12, "cpu", lambda budget: 0) == MAX_TOKENS["cpu"]


def test_the_budget_goes_down_to_one_token() -> None:
    cost = TokenBytes(activation=1000, gateway=100)
    assert choose_budget(cost, 100_000, "cpu", lambda budget: 0) == 60
    assert choose_budget(cost, 100_000, "cpu", lambda budget: 450) == 15
    assert choose_budget(cost, 1000, "cpu", lambda budget: 0) == 1
    assert choose_budget(cost, -5, "cpu", lambda budget: 0) == 1
    assert choose_budget(cost, -5, "cpu", lambda budget: 0, least=7) == 7


def test_little_memory_means_a_small_budget_a_warning_and_the_flat_gradients(
    rollouts: list[Trajectory], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    _, _, expected = flat_sft(model, rollouts)
    model.zero_grad()
    gradients = sum(each.numel() for each in model.parameters()) * 4
    monkeypatch.setattr("treewise.engine.budget.free_bytes", lambda _: gradients + 400_000)
    engine = TreeEngine(model, "auto")
    engine.step(Forest.from_trajectories(rollouts))
    assert engine.max_tokens is not None
    assert 1 <= engine.max_tokens < 20
    assert gradient_error(gradients_of(model), expected) < expected.tolerance
    assert f"chose {engine.max_tokens} tokens at a time" in caplog.text


@pytest.mark.parametrize("setting", [0, -1, 1.5, "many", True])
def test_bad_budgets(setting: object) -> None:
    with pytest.raises(ConfigError, match="max_tokens="):
        TreeEngine(tiny_model(), setting)
