"""The engine against flat training: budgets, dtypes, adapters, checkpointing, autocast, any loss."""

import copy
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from tests.crossings import judged
from treewise import SFT, Forest, Trajectory, TreeEngine, plan
from treewise.errors import ConfigError, DataError, UnsupportedModelError
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_loss, flat_sft, gradient_error, gradients_of
from treewise.testing.strategies import budgets, trajectories

# See tests/nn/test_support_table.py: differences of independent float32 summation orders.
TOLERANCE = 5e-6
BUDGETS = (None, 17, 5, 1)


@pytest.fixture
def rollouts() -> list[Trajectory]:
    rng = np.random.default_rng(1)
    prompt = rng.integers(3, 64, 9)
    items = [np.concatenate([prompt[: 4 + number], rng.integers(3, 64, 3 + 2 * number)]) for number in range(5)]
    return [Trajectory(ids) for ids in [*items, items[2][:6], items[0]]]


def tree_gradients(model, items, max_tokens=None, **options):
    model.zero_grad()
    engine = TreeEngine(model, max_tokens, **options)
    out = engine.step(Forest.from_trajectories(items))
    return out, gradients_of(model)


MODEL = tiny_model("llama", num_hidden_layers=2)


@pytest.mark.slow
@settings(max_examples=2 * settings().max_examples)
@given(data=st.data(), items=trajectories(vocab_size=5))
def test_random_forests_at_random_budgets(data: st.DataObject, items: list[Trajectory]) -> None:
    loss, _, expected = flat_sft(MODEL, items)
    forest = Forest.from_trajectories(items)
    for attention in ("cascade", "reference"):
        hold = data.draw(st.sampled_from(["auto", "never", "always"]))
        out, found = tree_gradients(MODEL, items, data.draw(budgets(forest)), attention=attention, hold=hold)
        assert out.loss == pytest.approx(loss, rel=expected.tolerance)
        assert gradient_error(found, expected) < expected.tolerance


def test_held_and_recomputed_plans_agree() -> None:
    """A short prompt over many samples: held, it is computed once."""
    rng = np.random.default_rng(3)
    items = [Trajectory(np.concatenate([np.arange(3, 9), rng.integers(3, 64, 9)])) for _ in range(5)]
    model = tiny_model()
    _, _, expected = flat_sft(model, items)
    for hold, num_computed in (("always", 6 + 5 * 9), ("never", 6 + 5 * 9 + 6)):
        out, found = tree_gradients(model, items, 24, hold=hold)
        assert out.num_computed_tokens == num_computed
        assert gradient_error(found, expected) < expected.tolerance


LORA = ("lora", "dora", "lora_head", "lora_embedding", "lora_one_layer")
SETTINGS = [
    {"offload": True, "budget": "half", "hold": "never"},
    {"offload": True, "budget": "half", "hold": "always", "attention": "reference"},
    *({"trained": each, "budget": "tiny"} for each in ("last_layer", *LORA)),
    {"variant": "tied", "budget": "tiny"},
    {"family": "mixtral", "variant": "routed", "budget": "tiny", "checkpoints": "on"},
    *(pytest.param({"trained": each}, marks=pytest.mark.exhaustive) for each in ("last_layer", *LORA)),
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_settings(changes: dict[str, Any]) -> None:
    assert judged(**changes).kind == "equal", judged(**changes).text


@pytest.mark.slow
@pytest.mark.representatives("None", "5")
@pytest.mark.parametrize("max_tokens", BUDGETS)
def test_float64_is_exact_beyond_float32(rollouts: list[Trajectory], max_tokens: int | None) -> None:
    """transformers computes norms in float32 even in float64 models, so their noise (3e-8) is the floor."""
    model = tiny_model(dtype=torch.float64)
    _, _, expected = flat_sft(model, rollouts)
    for attention in ("cascade", "reference"):
        _, found = tree_gradients(model, rollouts, max_tokens, attention=attention)
        assert gradient_error(found, expected) < 1e-7


@pytest.mark.slow
def test_bfloat16_deviates_no_more_than_flat_bfloat16(rollouts: list[Trajectory]) -> None:
    _, _, exact = flat_sft(tiny_model(), rollouts)
    model = tiny_model(dtype=torch.bfloat16)
    _, _, flat = flat_sft(model, rollouts)
    for max_tokens in (None, 17):
        _, found = tree_gradients(model, rollouts, max_tokens)
        assert gradient_error(found, exact) < 1.25 * gradient_error(flat, exact)


def pairwise_loss(logprobs: list[torch.Tensor]) -> torch.Tensor:
    """Not separable: sums of trajectories meet in a softplus, another token's square in a product."""
    sums = torch.stack([each.sum() for each in logprobs])
    return torch.nn.functional.softplus(sums[1] - sums[0]) + 1e-3 * (sums[2:] * sums[:-2]).mean()


@pytest.mark.slow
@pytest.mark.representatives("None", "5")
@pytest.mark.parametrize("max_tokens", BUDGETS)
def test_any_loss(rollouts: list[Trajectory], max_tokens: int | None) -> None:
    model = tiny_model()
    loss, expected = flat_loss(model, rollouts, pairwise_loss)
    forest = Forest.from_trajectories(rollouts)
    model.zero_grad()
    engine = TreeEngine(model, max_tokens)
    assert engine.step(forest, pairwise_loss).loss == pytest.approx(loss, rel=expected.tolerance)
    assert gradient_error(gradients_of(model), expected) < expected.tolerance
    model.zero_grad()
    twice = 0.3 * pairwise_loss(engine.logprobs(forest)) + 0.7 * pairwise_loss(engine.logprobs(forest))
    twice.backward()
    assert gradient_error(gradients_of(model), expected) < expected.tolerance


def test_backward_that_runs_outside_autocast_computes_as_the_forward_did(rollouts: list[Trajectory]) -> None:
    model = tiny_model()
    forest = Forest.from_trajectories(rollouts)
    found = []
    for max_tokens in (None, 17):
        engine = TreeEngine(model, max_tokens)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            engine.step(forest)
        inside = gradients_of(model)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = engine.logprobs(forest)
            loss = -torch.cat(logprobs).sum() / sum(len(each) for each in logprobs)
        loss.backward()
        assert gradient_error(gradients_of(model), inside) < TOLERANCE
        found.append(inside)
    _, _, exact = flat_sft(model, rollouts)
    assert all(gradient_error(each, exact) < 0.02 for each in found)


def test_evaluate_gives_the_loss_and_no_gradient(rollouts: list[Trajectory]) -> None:
    model = tiny_model()
    loss, _, _ = flat_sft(model, rollouts)
    model.zero_grad()
    for max_tokens in BUDGETS:
        out = TreeEngine(model, max_tokens).evaluate(Forest.from_trajectories(rollouts))
        assert out.loss == pytest.approx(loss, rel=TOLERANCE)
    assert not gradients_of(model)


@pytest.mark.parametrize("max_tokens", BUDGETS)
def test_evaluate_takes_a_function_as_step_does(rollouts: list[Trajectory], max_tokens: int | None) -> None:
    engine = TreeEngine(tiny_model(), max_tokens)

    def loss(logprobs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([each.exp().sum() for each in logprobs]).square().mean()

    out = engine.evaluate(rollouts, loss)
    assert not gradients_of(engine.model)
    assert out.loss == pytest.approx(engine.step(rollouts, loss).loss, rel=TOLERANCE)
    with pytest.raises(ConfigError, match="denominator= belongs to an objective"):
        engine.evaluate(rollouts, loss, denominator=2.0)


def test_generation_and_plain_forwards_go_on_as_before(rollouts: list[Trajectory]) -> None:
    model = tiny_model().eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    before = model(input_ids=ids).logits
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    text = model.generate(ids, **options)
    TreeEngine(model).step(Forest.from_trajectories(rollouts))
    assert torch.equal(model(input_ids=ids).logits, before)
    assert torch.equal(model.generate(ids, **options), text)
    assert "treewise" not in model.config.to_json_string()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(input_ids=ids).logits, before)


def test_refusals(rollouts: list[Trajectory]) -> None:
    forest = Forest.from_trajectories(rollouts)
    dropping = tiny_model("seed_oss", attention_dropout=0.25)
    with pytest.raises(UnsupportedModelError, match=r"layers.0.self_attn.attention_dropout is 0.25"):
        TreeEngine(dropping).step(forest)
    TreeEngine(dropping.eval()).step(forest)
    with pytest.raises(DataError, match=r"token id 64 .* 64 embeddings"):
        TreeEngine(tiny_model()).step(Forest.from_trajectories([Trajectory([1, 64])]))
    with pytest.raises(ConfigError, match="attention='fast'"):
        TreeEngine(tiny_model(), attention="fast")


@pytest.mark.parametrize("family", ["rwkv", "falcon", "bloom"])
def test_families_that_cannot_follow_a_tree_are_refused(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family))
    with pytest.raises(UnsupportedModelError):
        TreeEngine(model)


def test_the_probe_finds_an_unknown_step_after_the_decoder(rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    forward = model.forward

    def scaled(*args, **settings):
        output = forward(*args, **settings)
        output.logits = 3 * output.logits
        return output

    monkeypatch.setattr(model, "forward", scaled)
    with pytest.raises(UnsupportedModelError, match="between decoder and logits"):
        TreeEngine(model).step(Forest.from_trajectories(rollouts))


def test_a_head_with_a_forward_of_its_own_is_followed(rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()

    def tripled(head: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        return 3 * torch.nn.functional.linear(hidden, head.weight)

    monkeypatch.setattr(model.lm_head, "forward", MethodType(tripled, model.lm_head))
    loss, expected = flat_loss(model, rollouts, pairwise_loss)
    model.zero_grad()
    output = TreeEngine(model).step(Forest.from_trajectories(rollouts), pairwise_loss)
    assert output.loss == pytest.approx(loss, rel=1e-5)
    assert gradient_error(gradients_of(model), expected) < expected.tolerance


def test_what_is_no_forest_or_no_objective_is_named(rollouts: list[Trajectory]) -> None:
    model, forest = tiny_model("llama"), Forest.from_trajectories(rollouts)
    engine = TreeEngine(model)
    for wrong in (3, [3]):
        for call in (engine.step, engine.logprobs, lambda each: plan(each, max_tokens=8)):
            with pytest.raises(DataError, match=r"found a int; merge .* tw.Forest.from_trajectories"):
                call(wrong)
    for wrong, message in ((rollouts[0], "one Trajectory"), (forest, "one Forest")):
        with pytest.raises(DataError, match=message):
            Forest.from_trajectories(wrong)
    for objective, message in (
        (SFT, "the objective is SFT without brackets; call it"),
        ("sft", "the objective is 'sft'; call it"),
        (lambda logprobs: logprobs[0], r"one of shape \["),
        (lambda logprobs: 3.0, "a float"),
        (lambda logprobs: logprobs[0].detach().sum(), "no gradient"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.step(forest, objective)
