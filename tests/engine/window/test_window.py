"""Windows against flat training: calls of any size and order, whole and at budgets; and what may not happen in one."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

import treewise as tw
from treewise.engine.budget import gateway_token_bytes
from treewise.engine.window import scores
from treewise.engine.window.window import kept_token_bytes
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.held_logits import hold_logits
from treewise.nn.lm_head import edge_loss
from treewise.nn.recomputation import set_recomputation
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_logprobs, gradient_error, gradients_of
from treewise.testing.strategies import token_lists
from treewise.tree.trajectory import Trajectory

# Floats in which transformers computes norms; the tree's sums have another order.
CLOSE = 1e-6


def model_of(family="llama", **changes):
    return tiny_model(family, torch.float64, **changes)


def rows_of(sequences):
    return [Trajectory(sequence, np.arange(len(sequence)) > 0) for sequence in sequences]


def weighted(logprobs, number):
    """A loss of one call, which differs from call to call."""
    return sum((each * torch.linspace(-1, number + 1, each.shape[-1], dtype=each.dtype)).sum() for each in logprobs)


def flat_gradients(model, calls):
    model.zero_grad()
    for number, rows in enumerate(calls):
        weighted([flat_logprobs(model, row) for row in rows], number).backward()
    return gradients_of(model)


def window_gradients(model, calls, max_tokens=None, **settings):
    model.zero_grad()
    engine = tw.TreeEngine(model, max_tokens, check=False)
    with engine.window(**settings):
        for number, rows in enumerate(calls):
            weighted(engine.logprobs(rows), number).backward()
    return gradients_of(model)


SEQUENCES = [[5, 6, 7, 8, 9], [5, 6, 7, 20, 21], [5, 6, 7, 8, 9, 30, 31], [40, 41, 42], [5, 6, 50], [40, 41, 43, 44]]
CALLS = [rows_of([sequence]) for sequence in SEQUENCES]


@st.composite
def calls(draw):
    """Rows that share prefixes, dealt to calls of any size."""
    rows = rows_of(draw(token_lists(max_sequences=8, max_new_tokens=8, vocab_size=64)))
    found = []
    while rows:
        size = draw(st.integers(1, len(rows)))
        found.append(rows[:size])
        rows = rows[size:]
    return found


@given(calls(), st.sampled_from([None, 1, 3, 9]), st.sampled_from([None, 0, 4, 12]))
def test_gradients_are_those_of_flat_training(drawn, max_tokens, hold_tokens):
    model = model_of()
    expected = flat_gradients(model, drawn)
    found = window_gradients(model, drawn, max_tokens, hold_tokens=hold_tokens)
    assert gradient_error(found, expected) < CLOSE


@pytest.mark.parametrize("hold_tokens", [None, 0], ids=["held", "computed again"])
def test_rows_that_are_given_as_trees_of_their_own_are_computed_once(hold_tokens):
    """Also two that are the same, and one that begins another."""
    model = model_of()
    rows = [row for call in CALLS for row in (*call, *call)]
    expected = flat_gradients(model, [rows, rows[::-1]])
    model.zero_grad()
    engine = tw.TreeEngine(model, check=False)
    with engine.window(hold_tokens=hold_tokens) as window:
        for number, own in enumerate((rows, rows[::-1])):
            forest = tw.Forest.concatenate([tw.Forest.from_trajectories([row]) for row in own])
            weighted(engine.logprobs(forest), number).backward()
            assert window.is_new.sum() == (tw.Forest.from_trajectories(rows).num_tokens if number == 0 else 0)
        assert window.num_tokens == tw.Forest.from_trajectories(rows).num_tokens
    assert gradient_error(gradients_of(model), expected) < CLOSE


@pytest.mark.parametrize("hold_tokens", [None, 0], ids=["held", "computed again"])
@pytest.mark.parametrize(
    "family", ["qwen3", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "llama4_text"]
)
def test_families(family, hold_tokens):
    model = model_of(family)
    model.config._experts_implementation_internal = "eager"
    expected = flat_gradients(model, CALLS)
    assert gradient_error(window_gradients(model, CALLS, hold_tokens=hold_tokens), expected) < CLOSE


def test_every_token_is_computed_forward_once():
    model = model_of()
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    engine = tw.TreeEngine(model, check=False)
    with engine.window() as window:
        for rows in CALLS:
            engine.logprobs(rows)[0].sum().backward()
        num_tokens = tw.Forest.from_trajectories([row for rows in CALLS for row in rows]).num_tokens
        assert window.num_tokens == num_tokens == sum(seen)
    assert sum(seen) == num_tokens  # and the end is a backward alone


@pytest.mark.parametrize("hold_tokens", [None, 0])
def test_values_are_those_of_calls_by_themselves(hold_tokens):
    engine = tw.TreeEngine(model_of(), check=False)
    with engine.window(hold_tokens=hold_tokens):
        found = [engine.logprobs(rows)[0].detach() for rows in CALLS]
    for rows, logprobs in zip(CALLS, found, strict=True):
        torch.testing.assert_close(logprobs, engine.logprobs(rows)[0].detach(), atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("objective", [tw.SFT(), tw.GRPO(clip_high=0.28), tw.GSPO()], ids=["sft", "grpo", "gspo"])
@pytest.mark.parametrize("max_tokens", [None, 4])
def test_steps(objective, max_tokens):
    """Losses, metrics and gradients of `engine.step` call by call."""
    model = model_of()
    items = [
        [Trajectory(row.token_ids, advantages=0.5 - index, old_logprobs=np.full(len(row), -4.0)) for row in rows]
        for index, rows in enumerate(CALLS)
    ]

    def trained(context):
        model.zero_grad()
        engine = tw.TreeEngine(model, max_tokens, check=False)
        with context(engine):
            outs = [engine.step(rows, objective, denominator=7.0) for rows in items]
        return [(out.loss, dict(out.metrics)) for out in outs], gradients_of(model)

    expected, gradients = trained(lambda _: nullcontext())
    found, in_window = trained(lambda engine: engine.window())
    for (loss, metrics), (other, others) in zip(expected, found, strict=True):
        assert other == pytest.approx(loss, rel=CLOSE)
        assert others == pytest.approx(metrics, rel=CLOSE)
    assert gradient_error(in_window, gradients) < CLOSE


def test_calls_without_gradients_share_and_may_come_before_those_with_some():
    model = model_of()
    expected = flat_gradients(model, CALLS)
    model.zero_grad()
    engine = tw.TreeEngine(model, check=False)
    with engine.window() as window:
        with torch.no_grad():
            before = [engine.logprobs(rows)[0] for rows in CALLS[:3]]
        scored = window.num_tokens
        for number, rows in enumerate(CALLS):
            logprobs = engine.logprobs(rows)
            if number < 3:
                torch.testing.assert_close(logprobs[0], before[number], atol=CLOSE, rtol=CLOSE, check_dtype=False)
            weighted(logprobs, number).backward()
        assert window.num_tokens > scored
    assert gradient_error(gradients_of(model), expected) < CLOSE


def test_gradients_of_earlier_calls_are_added_to():
    model = model_of()
    expected = flat_gradients(model, [*CALLS, *CALLS])
    model.zero_grad()
    engine = tw.TreeEngine(model, check=False)
    for repeated in range(2):
        with engine.window():
            for number, rows in enumerate(CALLS):
                weighted(engine.logprobs(rows), number + repeated * len(CALLS)).backward()
    assert gradient_error(gradients_of(model), expected) < CLOSE


@pytest.mark.parametrize("hold_tokens", [None, 0], ids=["held", "again"])
@pytest.mark.parametrize("max_tokens", [None, 8, 4])
def test_router_losses_are_those_of_each_call(max_tokens, hold_tokens):
    model = model_of("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.3)
    model.config._experts_implementation_internal = "eager"

    def trained(context):
        model.zero_grad()
        engine = tw.TreeEngine(model, max_tokens, check=False)
        with context(engine):
            losses = [engine.step(rows, denominator=5.0).loss for rows in CALLS]
        return losses, gradients_of(model)

    losses, expected = trained(lambda _: nullcontext())
    found, gradients = trained(lambda engine: engine.window(hold_tokens=hold_tokens))
    assert found == pytest.approx(losses, rel=CLOSE)
    assert gradient_error(gradients, expected) < CLOSE


def test_hooks_on_gradients_run_once():
    model = model_of()
    calls = []
    model.model.layers[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(
        lambda each: calls.append(each.grad.norm())
    )
    window_gradients(model, CALLS)
    assert len(calls) == 1


def test_autocast_holds_until_the_end():
    model = tiny_model("llama", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = window_gradients(model, CALLS)
    engine = tw.TreeEngine(model, check=False)
    model.zero_grad()
    with engine.window(hold_tokens=0):
        for number, rows in enumerate(CALLS):
            with torch.autocast("cpu", torch.bfloat16):
                loss = weighted(engine.logprobs(rows), number)
            loss.backward()
    assert gradient_error(gradients_of(model), expected) < 0.05
    assert gradient_error(gradients_of(model), flat_gradients(model, CALLS)) > 1e-4  # float32 would be there


def test_adapters_that_are_switched_are_another_function():
    base = model_of()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.add_adapter("other", LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False))

    def trained(context, score):
        model.zero_grad()
        for number, rows in enumerate(CALLS):
            model.set_adapter("other" if number % 2 else "default")
            with torch.no_grad(), model.disable_adapter():
                score(rows)
            weighted(score(rows), number).backward()
        model.set_adapter("default")
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    expected = trained(nullcontext(), lambda rows: [flat_logprobs(model, row) for row in rows])
    engine = tw.TreeEngine(model, check=False)
    with engine.window():
        trained(None, engine.logprobs)
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert expected.keys() == found.keys()
    assert gradient_error(found, expected) < CLOSE


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("hold_tokens", [None, 0])
def test_gradient_checkpointing(use_reentrant, hold_tokens):
    model = model_of()
    expected = flat_gradients(model, CALLS)
    set_recomputation(model, True, {"use_reentrant": use_reentrant})
    model.train()
    assert gradient_error(window_gradients(model, CALLS, hold_tokens=hold_tokens), expected) < CLOSE


def test_beyond_its_tokens_calls_are_computed_by_themselves():
    model = model_of()
    expected = flat_gradients(model, CALLS)
    engine = tw.TreeEngine(model, check=False)
    model.zero_grad()
    with engine.window(max_tokens=6) as window:
        for number, rows in enumerate(CALLS):
            weighted(engine.logprobs(rows), number).backward()
        assert 0 < window.num_tokens <= 6
    assert gradient_error(gradients_of(model), expected) < CLOSE


def test_out_of_memory_lets_go_of_graphs(monkeypatch):
    from treewise.engine.window import chunks

    model = model_of()
    expected = flat_gradients(model, CALLS)
    own, calls = chunks.run_decoder, []

    def run(*args, **kwargs):
        calls.append(torch.is_grad_enabled())
        if len(calls) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return own(*args, **kwargs)

    monkeypatch.setattr(chunks, "run_decoder", run)
    assert gradient_error(window_gradients(model, CALLS), expected) < CLOSE
    assert calls[:4] == [True, True, True, False]


# -- what may not happen ----------------------------------------------------------------------------------------------


def interrupted(model, what):
    """A window in which `what` happens once gradients of a call came back."""
    engine = tw.TreeEngine(model, check=False)
    with engine.window():
        engine.hidden_states(CALLS[0])[0].sum().backward()
        what()


def test_a_step_of_the_optimizer_within_a_window_is_an_error():
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="SGD was to step while a window holds gradients"):
        interrupted(model, optimizer.step)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.step()  # no window is open any more


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_that_change_within_a_window_are_an_error(through_data):
    model = model_of()
    weight = model.model.layers[0].mlp.up_proj.weight

    @torch.no_grad()
    def change():
        (weight.data if through_data else weight).mul_(1.5)

    with pytest.raises(ConfigError, match="weights were changed within a window"):
        interrupted(model, change)
    assert all(each.grad is None for each in model.parameters())


def test_weights_that_change_before_gradients_came_are_computed_with_anew():
    model = model_of()
    engine = tw.TreeEngine(model, check=False)
    with engine.window():
        with torch.no_grad():
            first = engine.logprobs(CALLS[0])[0]
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        again = engine.logprobs(CALLS[0])[0]
        assert not torch.allclose(first, again)
        torch.testing.assert_close(again, flat_logprobs(model, CALLS[0][0]), atol=CLOSE, rtol=CLOSE)


def test_zero_grad_within_a_window_forgets_what_came_before():
    model = model_of()
    expected = flat_gradients(model, CALLS[2:])
    for set_to_none in (True, False):
        model.zero_grad()
        engine = tw.TreeEngine(model, check=False)
        with engine.window():
            for number, rows in enumerate(CALLS):
                if number == 2:
                    model.zero_grad(set_to_none)
                weighted(engine.logprobs(rows), max(number - 2, 0)).backward()
        assert gradient_error(gradients_of(model), expected) < CLOSE


def test_a_backward_twice_is_torchs_error_or_adds_twice():
    model = model_of()
    engine = tw.TreeEngine(model, check=False)
    with engine.window():
        total = engine.hidden_states(CALLS[0])[0].sum()
        total.backward()
        with pytest.raises(RuntimeError, match="second time"):
            total.backward()
    once = gradients_of(model)
    model.zero_grad()
    with engine.window():
        total = engine.hidden_states(CALLS[0])[0].sum()
        total.backward(retain_graph=True)
        total.backward()
    twice = gradients_of(model)
    assert gradient_error({name: each / 2 for name, each in twice.items()}, once) < CLOSE


def test_a_backward_after_the_end_is_an_error():
    engine = tw.TreeEngine(model_of(), check=False)
    with engine.window():
        late = engine.logprobs(CALLS[0])[0].sum()
    with pytest.raises(ConfigError, match="values of a window that has ended"):
        late.backward()


def test_an_error_within_a_window_leaves_no_part_of_a_gradient():
    model = model_of()
    with pytest.raises(KeyError):
        interrupted(model, lambda: {}["missing"])
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("hold_tokens", [None, 0])
@pytest.mark.parametrize("kind", ["logprobs", "hidden"])
def test_values_without_a_backward_add_nothing(kind, hold_tokens):
    model = model_of()
    engine = tw.TreeEngine(model, check=False)
    ask = engine.logprobs if kind == "logprobs" else engine.hidden_states
    weighted(ask(CALLS[0]), 0).backward()
    expected = gradients_of(model)
    model.zero_grad()
    with engine.window(hold_tokens=hold_tokens):
        weighted(ask(CALLS[0]), 0).backward()
        for rows in CALLS[1:]:
            ask(rows)
    assert gradient_error(gradients_of(model), expected) < CLOSE


def test_windows_do_not_nest():
    engine = tw.TreeEngine(model_of(), check=False)
    with engine.window(), pytest.raises(ConfigError, match="within a window already"), engine.window():
        pass


def test_recurrent_layers_are_refused_by_name():
    engine = tw.TreeEngine(tiny_model("qwen3_next", torch.float32), check=False)
    with pytest.raises(UnsupportedModelError, match="recurrent layers"), engine.window():
        pass


def test_settings_are_numbers_of_tokens():
    engine = tw.TreeEngine(model_of(), check=False)
    with pytest.raises(ConfigError, match="hold_tokens='all'"), engine.window(hold_tokens="all"):
        pass


def test_what_is_kept_is_counted_and_bounded_in_bytes():
    """Keys, values and their gradients in every layer, a hidden row and its gradient; graphs as they were measured."""
    model = model_of()
    engine = tw.TreeEngine(model, check=False)
    config = model.config
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    with engine.window(hold_tokens=7, max_bytes=10**6) as window:
        each = kept_token_bytes(engine.lm)
        assert each == gateway_token_bytes(engine.lm) + 2 * config.hidden_size * (8 + 8) >= values * (8 + 8)
        assert window.max_tokens == 10**6 // each
        assert str(window).endswith("; graphs of at most 7 tokens")
        engine.logprobs(CALLS[0])
        assert window.num_bytes > window.num_tokens * each
        for rows in CALLS[1:]:
            engine.logprobs(rows)
        assert window.num_bytes == window.num_tokens * each
    with engine.window(max_tokens=5, max_bytes=10**6) as window:
        assert window.max_tokens == 5
    with engine.window(max_tokens=5, max_bytes=0) as window:
        weighted(engine.logprobs(CALLS[0]), 0).backward()
        assert window.num_calls == 0
    with (
        pytest.raises(ConfigError, match="max_bytes='1GB' of a window; give a number of bytes"),
        engine.window(max_bytes="1GB"),
    ):
        pass


@pytest.mark.parametrize("hold_tokens", [None, 0])
def test_logits_are_held_with_graphs(hold_tokens, monkeypatch):
    """So the head projects a pair once in all; without graphs once more, at the end."""
    calls, again = [], []
    monkeypatch.setattr(scores, "hold_logits", lambda *given: calls.append(given[2]) or hold_logits(*given))
    monkeypatch.setattr(scores, "edge_loss", lambda *given: again.append(given[2]) or edge_loss(*given))
    model = model_of()
    expected = flat_gradients(model, CALLS)
    assert gradient_error(window_gradients(model, CALLS, hold_tokens=hold_tokens), expected) < CLOSE
    pairs = sum(len({tuple(each[:n]) for each in SEQUENCES if len(each) >= n}) for n in range(2, 8))
    assert [sum(map(len, each)) for each in (calls, again)] == ([pairs, 0] if hold_tokens is None else [0, pairs])


def test_logits_beyond_memory_are_not_held(monkeypatch):
    """Graphs are let go then, too: what is held has to fit."""
    failed = []

    def no_room(*given):
        if len(failed) == 0 and len(given[2]) < 4:  # not of the first call
            failed.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hold_logits(*given)

    monkeypatch.setattr(scores, "hold_logits", no_room)
    model = model_of()
    expected = flat_gradients(model, CALLS)
    assert gradient_error(window_gradients(model, CALLS), expected) < CLOSE
    assert failed
