"""Chunked edge log-probs and entropies against a plain log-softmax, with gradients."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treewise.nn import lm_head
from treewise.nn.lm_head import OUTPUTS, Head, edge_values


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 7),
    num_edges=st.integers(0, 12),
    max_logits=st.sampled_from([1, 22, 1000]),
    scale=st.sampled_from([1.0, 0.3]),
    softcap=st.sampled_from([None, 2.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    has_bias=st.booleans(),
)
def test_values_and_gradients(seed, num_rows, num_edges, max_logits, scale, softcap, temperature, has_bias) -> None:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    hidden, weight, bias = leaf(num_rows, 5), leaf(11, 5), leaf(11) if has_bias else None
    source = torch.randint(num_rows, (num_edges,), generator=generator).sort().values
    target = torch.randint(11, (num_edges,), generator=generator)
    inputs = [each for each in (hidden, weight, bias) if each is not None]

    raw = scale * torch.nn.functional.linear(hidden, weight, bias)
    capped = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    logits = torch.log_softmax(capped / temperature, dim=-1)
    expected = logits[source, target]
    entropy = -(logits.exp() * logits).sum(-1)[source]

    head = Head(weight, bias, scale, softcap, temperature)
    with mock.patch.dict(lm_head.MAX_LOGITS, cpu=max_logits):
        values = edge_values(hidden, head, source, target, OUTPUTS)
    found, found_entropy = values["log_probs"], values["entropy"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found_entropy, entropy, rtol=0, atol=1e-12)

    mixed = torch.randn(2, num_edges, dtype=torch.float64, generator=generator)
    left = torch.autograd.grad((found * mixed[0] + found_entropy * mixed[1]).sum(), inputs, allow_unused=True)
    right = torch.autograd.grad((expected * mixed[0] + entropy * mixed[1]).sum(), inputs, allow_unused=True)
    for one, other, leaf_ in zip(left, right, inputs, strict=True):
        zero = torch.zeros_like(leaf_)
        torch.testing.assert_close(zero if one is None else one, zero if other is None else other, rtol=0, atol=1e-11)


def test_no_more_than_a_chunk_of_logits_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = []
    project = lm_head._project
    monkeypatch.setattr(lm_head, "_project", lambda *args: largest.append(project(*args)) or largest[-1])
    hidden = torch.randn(100, 4, requires_grad=True)
    weight = torch.randn(50, 4, requires_grad=True)
    source = torch.arange(100)
    monkeypatch.setitem(lm_head.MAX_LOGITS, "cpu", 500)
    found = edge_values(hidden, Head(weight), source, source % 50)["log_probs"]
    found.sum().backward()
    assert max(each.numel() for each in largest) == 500
    assert len(largest) == 2 * 10


def test_low_precision_accumulates_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 16, generator=generator)
    weight = torch.randn(32, 16, generator=generator) / 4
    target = torch.randint(32, (64,), generator=generator)
    exact = weight.double().requires_grad_()
    edge_values(hidden.bfloat16().double(), Head(exact), torch.arange(64), target)["log_probs"].sum().backward()
    errors = []
    for max_logits in (64 * 32, 32):  # one chunk, and one row at a time
        low = weight.bfloat16().requires_grad_()
        with mock.patch.dict(lm_head.MAX_LOGITS, cpu=max_logits):
            logprobs = edge_values(hidden.bfloat16(), Head(low), torch.arange(64), target)["log_probs"]
            assert logprobs.dtype == torch.float32
            logprobs.sum().backward()
        errors.append((low.grad.double() - exact.grad).norm() / exact.grad.norm())
    assert errors[1] < 1.5 * errors[0]
