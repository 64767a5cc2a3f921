"""Faults within a window: either the gradients of flat training, or an error and none."""

import threading

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

import treewise as tw
from tests.engine.window.test_window import CALLS, CLOSE, flat_gradients, model_of, weighted
from treewise.engine.window import chunks, new_window
from treewise.engine.window.guards import Weights
from treewise.errors import ConfigError, OutOfMemoryError
from treewise.testing.oracle import flat_logprobs, gradient_error, gradients_of


def no_gradient(model):
    return all(each.grad is None for each in model.parameters())


# -- memory -----------------------------------------------------------------------------------------------------------


def test_weights_that_are_changed_or_replaced_are_seen():
    model = torch.nn.Linear(2, 2)
    weights = Weights(model)
    assert not weights.have_changed()
    model.weight.data = model.weight.data.clone()
    assert weights.have_changed()
    weights = Weights(model)
    with torch.no_grad():
        model.weight.add_(1)
    assert weights.have_changed()


def test_weights_that_diverged_have_not_changed():
    model = torch.nn.Linear(2, 2)
    for value in (torch.nan, torch.inf):
        model.weight.data.fill_(value)
        weights = Weights(model)
        weights.compare_values()
        model.weight.data.fill_(1)
        with pytest.raises(ConfigError, match="weights were changed"):
            weights.compare_values()


def test_memory_that_runs_out_at_the_end_takes_other_ways(monkeypatch):
    """Without the held graphs, then with fewer tokens at a time; earlier gradients stay."""
    model = model_of()
    expected = flat_gradients(model, CALLS)
    backward, tried = torch.autograd.backward, []
    engine = tw.TreeEngine(model, 8, check=False)

    def ends(*args, **kwargs):
        tried.append(engine.max_tokens)
        backward(*args, **kwargs)
        if len(tried) in (3, 5):  # in the middle, where a part of the gradients is there
            raise torch.OutOfMemoryError("out of memory")

    for hold_tokens in (None, 100):
        model.zero_grad()
        tried.clear()
        weighted(engine.logprobs(CALLS[0]), 0).backward()  # earlier than the window
        with engine.window(hold_tokens=hold_tokens):
            for number, rows in enumerate(CALLS[1:], 1):
                weighted(engine.logprobs(rows), number).backward()
            monkeypatch.setattr(torch.autograd, "backward", ends)
        monkeypatch.undo()
        assert len(tried) > 5
        assert gradient_error(gradients_of(model), expected) < CLOSE
    assert engine.max_tokens < 8


def test_memory_that_never_suffices_at_the_end_leaves_earlier_gradients_alone(monkeypatch):
    model = model_of()
    expected = flat_gradients(model, CALLS[:1])
    model.zero_grad()
    engine = tw.TreeEngine(model, 8, check=False)
    engine.logprobs(CALLS[0])
    weighted([flat_logprobs(model, CALLS[0][0])], 0).backward()
    backward = torch.autograd.backward

    def ends(*args, **kwargs):
        backward(*args, **kwargs)
        raise torch.OutOfMemoryError("out of memory")

    def trained():
        with engine.window():
            for number, rows in enumerate(CALLS):
                weighted(engine.logprobs(rows), number).backward()
            monkeypatch.setattr(torch.autograd, "backward", ends)

    with pytest.raises(OutOfMemoryError, match="even with one token"):
        trained()
    assert gradient_error(gradients_of(model), expected) < CLOSE


@pytest.mark.parametrize("hold_tokens", [None, 0])
def test_a_call_that_fails_adds_nothing_and_earlier_ones_stay(monkeypatch, hold_tokens):
    """In its forward, after some of its chunks, and in its backward, after the gradients were recorded."""
    model = model_of()
    calls = [call for index, call in enumerate(CALLS) if index not in (2, 4)]
    expected = flat_gradients(model, calls)
    engine = tw.TreeEngine(model, 2, check=False)
    model.zero_grad()
    own, runs = chunks.run_decoder, []

    def run(*args, **kwargs):
        runs.append(None)
        if len(runs) == 2:
            raise RuntimeError("a kernel failed")
        return own(*args, **kwargs)

    def fails_at_its_end(rows):
        with window.all_or_nothing():
            weighted(engine.logprobs(rows), 7).backward()
            raise KeyError

    done = 0
    with engine.window(hold_tokens=hold_tokens) as window:
        for index, rows in enumerate(CALLS):
            before = window.num_tokens, window.num_calls
            if index == 2:
                with monkeypatch.context() as patch:
                    patch.setattr(chunks, "run_decoder", run)
                    with pytest.raises(RuntimeError, match="a kernel failed"):
                        engine.logprobs([*rows, *CALLS[3]])
                assert len(runs) == 2
            elif index == 4:
                with pytest.raises(KeyError):
                    fails_at_its_end(rows)
            else:
                weighted(engine.logprobs(rows), done).backward()
                done += 1
                continue
            assert (window.num_tokens, window.num_calls) == before
    assert gradient_error(gradients_of(model), expected) < CLOSE


# -- gradients that hosts look at -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "hooks"])
def test_gradients_that_a_step_sets_aside_were_not_zeroed(kind):
    """A budget of `auto` and hooks on gradients move them out of the way."""
    model = model_of()

    def trained(engine):
        model.zero_grad()
        for rows in CALLS:
            engine.step(rows, denominator=5.0)
        return gradients_of(model)

    engine = tw.TreeEngine(model, "auto" if kind == "auto" else None, check=False)
    expected = trained(engine)
    if kind == "hooks":
        for each in model.parameters():
            each.register_hook(lambda grad: grad)
    with engine.window():
        trained(engine)
    assert gradient_error(gradients_of(model), expected) < CLOSE


@pytest.mark.parametrize("earlier", [False, True])
def test_zeros_that_calls_by_themselves_add_are_no_zero_grad(earlier):
    """Of an adapter that changes nothing yet one half has gradients of zero."""
    model = get_peft_model(model_of(), LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1]))
    calls = [*CALLS, *CALLS] if earlier else CALLS
    expected = flat_gradients(model, calls)
    model.zero_grad()
    engine = tw.TreeEngine(model, check=False)
    inside = len(calls) - len(CALLS)
    for number, rows in enumerate(calls[:inside]):
        weighted(engine.logprobs(rows), number).backward()
    with engine.window(max_tokens=9) as window:
        for number, rows in enumerate(calls[inside:], inside):
            weighted(engine.logprobs(rows), number).backward()
        assert 0 < window.num_calls < len(CALLS)
    found = gradients_of(model)
    assert gradient_error(found, expected) < CLOSE
    assert [not each.any() for each in found.values()] == [not each.any() for each in expected.values()]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("budget", [None, 4])
def test_gradients_that_are_zeroed_after_the_forward_of_a_call_by_itself(budget, set_to_none):
    """Before its backward, after which nothing of it is left to be seen."""
    model = model_of()
    expected = flat_gradients(model, CALLS[1:2])
    model.zero_grad()
    engine = tw.TreeEngine(model, budget, check=False)
    with engine.window(max_tokens=len(CALLS[0][0])):
        weighted(engine.logprobs(CALLS[0]), 0).backward()
        loss = weighted(engine.logprobs(CALLS[1]), 0)
        model.zero_grad(set_to_none=set_to_none)
        loss.backward()
    assert gradient_error(gradients_of(model), expected) < CLOSE


def in_a_thread(step, rows):
    thread = threading.Thread(target=step, args=(rows,))
    thread.start()
    thread.join()


def check_zeroed_before_a_step(model, set_to_none, run=lambda step, rows: step(rows)):
    """The gradients are those of the second step alone."""
    engine = tw.TreeEngine(model, check=False)
    engine.step(CALLS[1])
    expected = gradients_of(model)
    model.zero_grad()
    with engine.window():
        engine.step(CALLS[0])
        model.zero_grad(set_to_none=set_to_none)
        run(engine.step, CALLS[1])
    assert gradient_error(gradients_of(model), expected) < CLOSE


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_zeroed_before_a_step_in_another_thread(set_to_none):
    check_zeroed_before_a_step(model_of(), set_to_none, in_a_thread)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_a_head_alone_that_are_zeroed(set_to_none):
    model = model_of(tie_word_embeddings=False).requires_grad_(False)
    model.lm_head.requires_grad_(True)
    check_zeroed_before_a_step(model, set_to_none)


def adapted_experts():
    model = model_of("qwen3_moe")
    model.config._experts_implementation_internal = "eager"
    config = LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj"], init_lora_weights=False)
    return get_peft_model(model, config).to(torch.float64)


def test_adapted_experts_that_change_within_a_window_are_an_error():
    model = adapted_experts()
    engine = tw.TreeEngine(model, check=False)
    window = new_window(engine)
    engine.in_window = window
    weighted(engine.logprobs(CALLS[0]), 0).backward()
    for name, each in model.named_parameters():
        if name.endswith("gate_up_proj"):
            each.detach().mul_(1.5)
    with pytest.raises(ConfigError, match="weights were changed"):
        window.end()
    assert no_gradient(model)


def test_forwards_of_adapted_experts_are_no_change_of_weights():
    """PEFT counts one in each, but not where the first call has the adapter switched off, as a reference model."""
    model = adapted_experts()
    expected = flat_gradients(model, CALLS)
    model.zero_grad()
    engine = tw.TreeEngine(model, check=False)
    with engine.window():
        with torch.no_grad(), model.disable_adapter():
            engine.logprobs(CALLS[0])
        for number, rows in enumerate(CALLS):
            weighted(engine.logprobs(rows), number).backward()
    assert gradient_error(gradients_of(model), expected) < CLOSE


def test_gradients_that_are_scaled_in_the_middle_are_an_error():
    """What comes at the end would not be."""
    model = model_of()
    engine = tw.TreeEngine(model, check=False)

    def trained():
        with engine.window():
            weighted(engine.logprobs(CALLS[0]), 0).backward()
            for each in model.parameters():
                if each.grad is not None:
                    each.grad.mul_(0.5)

    with pytest.raises(ConfigError, match="scaled or clipped within a window"):
        trained()
    assert no_gradient(model)


def test_gradients_that_are_lost_are_an_error_until_they_are_zeroed():
    model = model_of()
    engine = tw.TreeEngine(model, check=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = engine.in_window = new_window(engine)
    weighted(engine.logprobs(CALLS[0]), 0).backward()
    with pytest.raises(ConfigError, match="SGD was to step"):
        optimizer.step()
    with pytest.raises(ConfigError, match="would be a part of them"):
        engine.logprobs(CALLS[1])
    optimizer.zero_grad()
    weighted(engine.logprobs(CALLS[1]), 1).backward()
    window.end()
    found = gradients_of(model)
    model.zero_grad()
    weighted([flat_logprobs(model, CALLS[1][0])], 1).backward()
    assert gradient_error(found, gradients_of(model)) < CLOSE
    weighted(engine.logprobs(CALLS[0]), 0).backward()
    with pytest.raises(ConfigError, match="SGD was to step"):
        optimizer.step()
    with pytest.raises(ConfigError, match="would be a part of them"):
        window.end()


def test_buffers_that_a_kernel_uses_again():
    """As Liger's losses: what they give as a gradient is overwritten by the next call."""
    model = model_of()
    buffer = torch.zeros(16, 32, dtype=torch.float64)

    class Reused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            ctx.size = len(hidden)
            return (hidden * torch.linspace(-1, 1, 32, dtype=hidden.dtype)).sum()

        @staticmethod
        def backward(ctx, grad):
            buffer[: ctx.size] = grad * torch.linspace(-1, 1, 32, dtype=buffer.dtype)
            return buffer[: ctx.size]

    def trained(all_or_nothing):
        model.zero_grad()
        engine = tw.TreeEngine(model, check=False)
        with engine.window() as window:
            for rows in CALLS:
                total = Reused.apply(engine.hidden_states(rows)[0])
                if all_or_nothing:
                    with window.all_or_nothing():
                        total.backward()
                        buffer.fill_(7.0)
                else:
                    total.backward()
                    buffer.fill_(7.0)
        return gradients_of(model)

    model.zero_grad()
    for rows in CALLS:
        Reused.apply(tw.TreeEngine(model, check=False).hidden_states(rows)[0]).backward()
    expected = gradients_of(model)
    for all_or_nothing in (False, True):
        assert gradient_error(trained(all_or_nothing), expected) < CLOSE


def test_an_optimizer_that_steps_in_the_backward_steps_once_at_the_end():
    """A head of the caller's, which has its gradients in the middle, then changes weights within the window."""

    def trained(in_window, own_head=False):
        model = model_of()
        optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters() if each.requires_grad}

        def step(parameter):
            optimizers[parameter].step()
            parameter.grad = None

        for each in optimizers:
            each.register_post_accumulate_grad_hook(step)
        engine = tw.TreeEngine(model, check=False)
        if in_window:
            with engine.window():
                for number, rows in enumerate(CALLS):
                    if own_head:
                        model.lm_head(engine.hidden_states(rows)[0]).sum().backward()
                    else:
                        weighted(engine.logprobs(rows), number).backward()
        else:
            sum(
                weighted([flat_logprobs(model, row) for row in rows], number) for number, rows in enumerate(CALLS)
            ).backward()
        return {name: each.detach().clone() for name, each in model.named_parameters()}

    found, expected = trained(in_window=True), trained(in_window=False)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=CLOSE, rtol=CLOSE)
    with pytest.raises(ConfigError, match="weights were changed within a window"):
        trained(in_window=True, own_head=True)


# -- models, threads --------------------------------------------------------------------------------------------------


def test_two_models_have_windows_of_their_own():
    """A step of the one is none of the other's, as of a critic's optimizer."""
    first, second = model_of(), model_of()
    with torch.no_grad():
        for each in second.parameters():
            each.add_(0.01)
    expected = [flat_gradients(model, CALLS) for model in (first, second)]
    for model in (first, second):
        model.zero_grad()
    engines = [tw.TreeEngine(model, check=False) for model in (first, second)]
    with engines[0].window():
        with engines[1].window():
            for number, rows in enumerate(CALLS):
                for engine in engines:
                    weighted(engine.logprobs(rows), number).backward()
        assert gradient_error(gradients_of(second), expected[1]) < CLOSE
        torch.optim.SGD(second.parameters(), lr=0.1).step()
    assert gradient_error(gradients_of(first), expected[0]) < CLOSE


def test_calls_of_another_thread_are_computed_by_themselves():
    model = model_of()
    expected = flat_gradients(model, CALLS)
    model.zero_grad()
    engine = tw.TreeEngine(model, check=False)

    def call(number):
        weighted(engine.logprobs(CALLS[number]), number).backward()

    with engine.window() as window:
        for number in range(len(CALLS)):
            if number % 2:
                thread = threading.Thread(target=call, args=(number,))
                thread.start()
                thread.join()
            else:
                call(number)
        assert window.num_calls == len(CALLS) // 2
    assert gradient_error(gradients_of(model), expected) < CLOSE


# -- values -----------------------------------------------------------------------------------------------------------


def test_evaluations_that_only_read_leave_nothing():
    model = model_of()
    expected = flat_gradients(model, CALLS)
    model.zero_grad()
    engine = tw.TreeEngine(model, check=False)
    with engine.window() as window:
        for number, rows in enumerate(CALLS):
            weighted(engine.logprobs(rows), number).backward()
            before = window.num_tokens
            with torch.no_grad(), window.only_reading():
                for others in CALLS:
                    found = engine.logprobs(others)[0]
                    assert window.is_new.sum() <= len(others[0])
                    torch.testing.assert_close(found, flat_logprobs(model, others[0]), atol=CLOSE, rtol=CLOSE)
            assert window.num_tokens == before
    assert gradient_error(gradients_of(model), expected) < CLOSE


def test_what_a_step_computed_is_what_was_new():
    engine = tw.TreeEngine(model_of(), check=False)
    with engine.window():
        found = [engine.step(rows, denominator=1.0).num_computed_tokens for rows in [*CALLS, *CALLS]]
    union = tw.Forest.from_trajectories([row for rows in CALLS for row in rows])
    assert np.sum(found[: len(CALLS)]) == union.num_tokens
    assert not any(found[len(CALLS) :])
