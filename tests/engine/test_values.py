"""Values of a whole forest as differentiable functions: hidden states, entropies, tokens that are not the tree's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treewise import Forest, Trajectory, TreeEngine
from treewise.engine.edge_scorer import EdgeScorer
from treewise.engine.values import Reader, token_reader
from treewise.errors import ConfigError
from treewise.nn.lm_head import OUTPUTS
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of
from treewise.testing.strategies import budgets, trajectories

# See tests/nn/test_support_table.py: differences of independent float32 summation orders.
TOLERANCE = 5e-6
MODEL = tiny_model("llama", num_hidden_layers=2)
# The embedding of token 0, the padding, is zero, and so is everything that follows from it alone.
WITHOUT_PADDING = trajectories(vocab_size=5).map(lambda items: [Trajectory(item.token_ids + 1) for item in items])


def flat_outputs(item: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Final hidden states [n, M] and log-probabilities of all tokens [n, V], with a graph."""
    ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
    hidden = MODEL.model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[0], torch.log_softmax(MODEL.lm_head(hidden)[0], dim=-1)


def mixed(values: list[torch.Tensor], seed: int) -> torch.Tensor:
    """A function whose gradient differs for each value, depends on the others, and never vanishes."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.stack([(each * torch.randn(each.shape, generator=generator)).sum() for each in values])
    return ((1 + sums.square()).sqrt() + 2 * sums).sum()


def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
    MODEL.zero_grad()
    loss.backward()
    return gradients_of(MODEL)


@given(data=st.data(), items=WITHOUT_PADDING, hold=st.sampled_from(["never", "always"]))
def test_hidden_states(data: st.DataObject, items: list[Trajectory], hold: str) -> None:
    forest = Forest.from_trajectories(items)
    engine = TreeEngine(MODEL, data.draw(budgets(forest)), hold=hold, check=False)
    found, expected = engine.hidden_states(forest), [flat_outputs(item)[0] for item in items]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    assert gradient_error(gradients(mixed(found, 0)), gradients(mixed(expected, 0))) < 2 * TOLERANCE


@given(data=st.data(), items=WITHOUT_PADDING)
def test_entropies_beside_log_probs(data: st.DataObject, items: list[Trajectory]) -> None:
    forest = Forest.from_trajectories(items)
    engine = TreeEngine(MODEL, data.draw(budgets(forest)), check=False)
    values = engine.values(engine.plan(forest), [token_reader(forest, outputs=OUTPUTS)])[0]
    logits = [flat_outputs(item)[1][:-1] for item in items]
    paths = [torch.as_tensor(path[1:]) for path in forest.paths]
    entropy = [-(each.exp() * each).sum(-1) for each in logits]
    chosen = [
        each.gather(1, torch.as_tensor(item.token_ids[1:, None].astype(np.int64)))[:, 0]
        for each, item in zip(logits, items, strict=True)
    ]
    for path, one, other in zip(paths, entropy, chosen, strict=True):
        torch.testing.assert_close(values["entropy"][path], one, rtol=0, atol=2e-5)
        torch.testing.assert_close(values["log_probs"][path], other, rtol=0, atol=2e-5)
    found = mixed([values["entropy"][path] for path in paths] + [values["log_probs"][path] for path in paths], 1)
    assert gradient_error(gradients(found), gradients(mixed(entropy + chosen, 1))) < 2 * TOLERANCE


@given(data=st.data(), items=WITHOUT_PADDING, seed=st.integers(0, 2**31))
def test_tokens_that_are_not_the_trees(data: st.DataObject, items: list[Trajectory], seed: int) -> None:
    """Three candidates for every token of every trajectory, as distillation scores them."""
    rng = np.random.default_rng(seed)
    forest = Forest.from_trajectories(items)
    engine = TreeEngine(MODEL, data.draw(budgets(forest)), check=False)
    candidates = [rng.integers(0, 64, (len(item) - 1, 3)) for item in items]
    positions = np.concatenate([np.repeat(path[1:], 3) for path in forest.paths])
    order = np.argsort(positions, kind="stable")
    scored = EdgeScorer(forest, positions[order], np.concatenate([each.ravel() for each in candidates])[order])
    in_order = engine.values(engine.plan(forest), [Reader(scored, scored.outputs, len(scored.positions))])[0][
        "log_probs"
    ]
    found = torch.zeros_like(in_order).index_copy(0, torch.as_tensor(order), in_order)
    expected = torch.cat(
        [
            flat_outputs(item)[1][:-1].gather(1, torch.as_tensor(each)).ravel()
            for item, each in zip(items, candidates, strict=True)
        ]
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert gradient_error(gradients(mixed([found], 2)), gradients(mixed([expected], 2))) < 2 * TOLERANCE


def test_nothing_scored_is_a_zero_with_a_backward() -> None:
    forest = Forest.from_trajectories([Trajectory(np.arange(9)), Trajectory(np.arange(4))])
    for max_tokens in (None, 3):
        engine = TreeEngine(MODEL, max_tokens, check=False)
        reader = token_reader(forest, is_needed=np.zeros(forest.num_tokens, dtype=bool))
        values = engine.values(engine.plan(forest), [reader])[0]
        assert not values["log_probs"].any()
        assert all(not grad.any() for grad in gradients(values["log_probs"].sum()).values())


@pytest.mark.parametrize("max_tokens", [None, 3])
def test_without_gradients(max_tokens: int | None) -> None:
    forest = Forest.from_trajectories([Trajectory(np.arange(9)), Trajectory(np.arange(4))])
    engine = TreeEngine(MODEL, max_tokens, check=False)
    with torch.no_grad():
        assert not engine.hidden_states(forest)[0].requires_grad


def test_a_part_of_the_gradient_and_values_used_twice() -> None:
    """`autograd.grad`, `inputs=` and hooks get the gradient of one backward, and `.grad` keeps what it held."""
    items = [Trajectory(np.arange(1, 10)), Trajectory(np.r_[1:5, 20:24])]
    model = tiny_model(num_hidden_layers=2)
    _, _, expected = flat_sft(model, items)
    named = dict(model.named_parameters())
    count = sum(len(item) - 1 for item in items)
    for max_tokens in (None, 3):
        engine = TreeEngine(model, max_tokens)

        def loss(engine: TreeEngine = engine) -> torch.Tensor:
            halves = [sum(each.sum() for each in engine.logprobs(items)) for _ in range(2)]
            return -(halves[0] + halves[1]) / 2 / count

        for each in named.values():
            each.grad = torch.ones_like(each)
        found = dict(zip(named, torch.autograd.grad(loss(), list(named.values())), strict=True))
        assert gradient_error(found, expected) < expected.tolerance
        assert all(bool((each.grad == 1).all()) for each in named.values())
        chosen, calls = named["model.layers.1.mlp.up_proj.weight"], []
        handles = [
            chosen.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3)),
            chosen.register_post_accumulate_grad_hook(calls.append),
        ]
        loss().backward(inputs=[chosen])
        clamped = 1 + expected["model.layers.1.mlp.up_proj.weight"].clamp(-1e-3, 1e-3)
        torch.testing.assert_close(chosen.grad, clamped, rtol=0, atol=1e-6)
        assert len(calls) == 1
        assert all(bool((each.grad == 1).all()) for each in named.values() if each is not chosen)
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("earlier", [None, 5.0])
@pytest.mark.parametrize("max_tokens", [None, 3])
def test_hooks_of_a_parameter_that_gets_no_gradient_do_not_run(max_tokens: int | None, earlier: float | None) -> None:
    """As in flat training, whether it has an earlier gradient or none; one from elsewhere in the graph still comes to
    them, once."""
    model, items = tiny_model(num_hidden_layers=2), [Trajectory(np.arange(1, 10)), Trajectory(np.r_[1:5, 20:24])]
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
    model.unused.grad = None if earlier is None else torch.full((2,), earlier)
    calls: list[torch.Tensor] = []

    def twice(grad: torch.Tensor) -> torch.Tensor:
        calls.append(grad)
        return 2 * grad

    def add_one(parameter: torch.nn.Parameter) -> None:
        calls.append(parameter)
        parameter.grad += 1

    model.unused.register_hook(twice)
    model.unused.register_post_accumulate_grad_hook(add_one)
    engine = TreeEngine(model, max_tokens, check=False)
    logprobs = [torch.cat(engine.logprobs(items)).sum() for _ in range(2)]
    (logprobs[0] + logprobs[1]).backward(retain_graph=True)
    assert not calls
    assert model.unused.grad is None if earlier is None else model.unused.grad.tolist() == [earlier] * 2
    assert list(model.unused._backward_hooks.values()) == [twice]
    assert list(model.unused._post_accumulate_grad_hooks.values()) == [add_one]
    (logprobs[0] + model.unused.sum()).backward()
    assert len(calls) == 2
    assert model.unused.grad.tolist() == [3 + (earlier or 0)] * 2


@pytest.mark.parametrize("max_tokens", [None, 3])
def test_second_derivatives_are_an_error(max_tokens: int | None) -> None:
    engine, items = TreeEngine(tiny_model(num_hidden_layers=2), max_tokens), [Trajectory(np.arange(1, 10))]
    values = [engine.logprobs(items)[0].sum(), engine.hidden_states(items)[0].square().sum()]
    for value in values:
        with pytest.raises(ConfigError, match="first derivatives only; create_graph=True"):
            value.backward(create_graph=True)
        with pytest.raises(ConfigError, match="first derivatives only; create_graph=True"):
            torch.autograd.grad(value, list(engine.model.parameters()), create_graph=True, allow_unused=True)
