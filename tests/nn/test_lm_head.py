"""Chunked edge log-probs and entropies against a plain log-softmax, with gradients."""

import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treewise.nn import edge_values as of_values
from treewise.nn import lm_head
from treewise.nn.held_logits import hold_logits
from treewise.nn.lm_head import OUTPUTS, Head, LowRank, edge_loss, edge_values
from treewise.nn.module_head import ModuleHead


@settings(max_examples=5 * settings().max_examples)
@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 7),
    num_edges=st.integers(0, 12),
    max_logits=st.sampled_from([1, 22, 1000]),
    scale=st.sampled_from([1.0, 0.3]),
    softcap=st.sampled_from([None, 2.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    has_bias=st.booleans(),
    with_entropy=st.booleans(),
)
def test_values_and_gradients(
    seed, num_rows, num_edges, max_logits, scale, softcap, temperature, has_bias, with_entropy
) -> None:
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
        values = edge_values(hidden, head, source, target, OUTPUTS if with_entropy else ("log_probs",))
    torch.testing.assert_close(values["log_probs"], expected, rtol=0, atol=1e-12)
    if with_entropy:
        torch.testing.assert_close(values["entropy"], entropy, rtol=0, atol=1e-12)

    mixed = torch.randn(2, num_edges, dtype=torch.float64, generator=generator)
    found = sum((values[name] * weight).sum() for name, weight in zip(OUTPUTS, mixed, strict=True) if name in values)
    wanted = (expected * mixed[0] + (entropy * mixed[1] if with_entropy else 0)).sum()
    right = torch.autograd.grad(wanted, inputs, allow_unused=True, retain_graph=True)
    # A second backward has no logits of the forward to take over.
    for retain_graph in (True, False):
        left = torch.autograd.grad(found, inputs, allow_unused=True, retain_graph=retain_graph)
        for one, other, leaf_ in zip(left, right, inputs, strict=True):
            zero = torch.zeros_like(leaf_)
            torch.testing.assert_close(
                zero if one is None else one, zero if other is None else other, rtol=0, atol=1e-11
            )

    def squares(values: dict[str, torch.Tensor], edges: slice) -> torch.Tensor:
        """Its gradients depend on the values."""
        return sum(
            (mix[edges] * values[name].square()).sum()
            for name, mix in zip(OUTPUTS, mixed, strict=True)
            if name in values
        )

    with mock.patch.dict(lm_head.MAX_LOGITS, cpu=max_logits):
        loss, of_edges = edge_loss(hidden, head, source, target, squares, OUTPUTS if with_entropy else ("log_probs",))
    wanted = (expected.square() * mixed[0] + (entropy.square() * mixed[1] if with_entropy else 0)).sum()
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-11)
    for name, value in of_edges.items():
        torch.testing.assert_close(value, values[name].detach(), rtol=0, atol=1e-12)
        assert not value.requires_grad
    right = torch.autograd.grad(wanted, inputs, allow_unused=True)
    left = torch.autograd.grad(loss, inputs, allow_unused=True)
    for one, other, leaf_ in zip(left, right, inputs, strict=True):
        zero = torch.zeros_like(leaf_)
        torch.testing.assert_close(zero if one is None else one, zero if other is None else other, rtol=0, atol=1e-10)


@settings(max_examples=4 * settings().max_examples)
@given(
    seed=st.integers(0, 2**31),
    max_logits=st.sampled_from([1, 22, 1000]),
    scale=st.sampled_from([1.0, 0.3]),
    has_bias=st.booleans(),
    given_names=st.sampled_from([("log_probs",), ("entropy",), OUTPUTS]),
)
def test_held_logits_give_the_gradients_of_a_graph(seed, max_logits, scale, has_bias, given_names) -> None:
    """Of some of the edges, the others have none; several edges may share a row."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    hidden, weight, bias = leaf(4, 5), leaf(11, 5), leaf(11) if has_bias else None
    source = torch.cat([torch.arange(4), torch.randint(4, (5,), generator=generator)]).sort().values.numpy()
    target = torch.randint(11, (9,), generator=generator)
    inputs = [each for each in (hidden, weight, bias) if each is not None]
    edges = np.flatnonzero(np.random.default_rng(seed).random(9) < 0.5)
    edges = edges if len(edges) else np.array([8])
    grads = {name: torch.randn(len(edges), dtype=torch.float64, generator=generator) for name in given_names}

    head = Head(weight, bias, scale, temperature=0.7)
    values = edge_values(hidden, head, source, target, OUTPUTS)
    held = hold_logits(hidden, head, source, target, OUTPUTS)
    values_held = held.values()
    for name in OUTPUTS:
        torch.testing.assert_close(values_held[name], values[name].detach(), rtol=0, atol=1e-12)
    right = torch.autograd.grad([values[name][edges] for name in grads], inputs, list(grads.values()))
    collecting = head.collecting()
    with mock.patch.dict(lm_head.MAX_LOGITS, cpu=max_logits):
        rows, of_rows = held.backward(edges, grads, collecting)
    collecting.gradients.join()
    assert rows.tolist() == sorted({*source[edges].tolist()})
    torch.testing.assert_close(torch.zeros_like(hidden).index_add(0, torch.from_numpy(rows), of_rows), right[0])
    for one, other in zip(inputs[1:], right[1:], strict=True):
        torch.testing.assert_close(one.grad, other, rtol=0, atol=1e-11)


def test_the_backward_takes_over_the_logits_of_the_latest_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    project = lm_head.project
    monkeypatch.setattr(of_values, "project", lambda *args, **options: calls.append(1) or project(*args, **options))
    head = Head(torch.randn(7, 3, requires_grad=True))

    def log_probs() -> torch.Tensor:
        source = torch.arange(4)
        return edge_values(torch.ones(4, 3), head, source, source)["log_probs"].sum()

    log_probs().backward()
    assert len(calls) == 1
    early, late = log_probs(), log_probs()
    early.backward()
    assert len(calls) == 4  # its logits were dropped
    late.backward()
    assert len(calls) == 4


def test_kept_logits_are_freed_with_their_graph() -> None:
    head = Head(torch.randn(7, 3, requires_grad=True))
    source = torch.arange(4)
    values = edge_values(torch.ones(4, 3), head, source, source)
    kept = values["log_probs"].grad_fn.kept
    assert kept.logits.shape == (4, 7)
    reference = weakref.ref(kept.logits)
    del values, kept
    assert reference() is None


def test_no_more_than_a_chunk_of_logits_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = []
    project = lm_head.project

    def watched(*args, **options):
        found = project(*args, **options)
        largest.append(found[0])
        return found

    monkeypatch.setattr(of_values, "project", watched)
    hidden = torch.randn(100, 4, requires_grad=True)
    weight = torch.randn(50, 4, requires_grad=True)
    source = torch.arange(100)
    monkeypatch.setitem(lm_head.MAX_LOGITS, "cpu", 500)
    found = edge_values(hidden, Head(weight), source, source % 50)["log_probs"]
    found.sum().backward()
    assert max(each.numel() for each in largest) == 500
    assert len(largest) == 2 * 10 - 1  # the last chunk is taken over


@pytest.mark.parametrize("trains", ["both", "hidden", "weight"])
def test_a_loss_projects_each_row_once(monkeypatch: pytest.MonkeyPatch, trains: str) -> None:
    largest = []
    project = lm_head.project

    def watched(*args, **options):
        found = project(*args, **options)
        largest.append(found[0].numel())
        return found

    monkeypatch.setattr(lm_head, "project", watched)
    hidden = torch.randn(100, 4, requires_grad=trains != "weight")
    weight = torch.randn(50, 4, requires_grad=trains != "hidden")
    source = torch.arange(100)
    monkeypatch.setitem(lm_head.MAX_LOGITS, "cpu", 500)
    loss, _ = edge_loss(hidden, Head(weight), source, source % 50, lambda values, _: values["log_probs"].sum())
    loss.backward()
    assert largest == 10 * [500]
    wanted = torch.log_softmax(hidden @ weight.t(), 1)[source, source % 50].sum()
    for leaf in (each for each in (hidden, weight) if each.requires_grad):
        (right,) = torch.autograd.grad(wanted, [leaf], retain_graph=True)
        torch.testing.assert_close(leaf.grad, right)


def test_a_collecting_head_has_the_gradients_of_a_loss_at_once() -> None:
    hidden, weight, source = (
        torch.randn(6, 4, requires_grad=True),
        torch.randn(5, 4, requires_grad=True),
        torch.arange(6),
    )
    head = Head(weight).collecting()
    for rows in (slice(0, 2), slice(2, 6)):
        part = edge_loss(
            hidden[rows],
            head,
            source[: rows.stop - rows.start],
            source[rows] % 5,
            lambda values, _: -values["log_probs"].sum(),
        )
        part[0].backward()
    assert weight.grad is None
    head.gradients.join()
    wanted = -torch.log_softmax(hidden @ weight.t(), 1)[source, source % 5].sum()
    for leaf, right in zip((hidden, weight), torch.autograd.grad(wanted, [hidden, weight]), strict=True):
        torch.testing.assert_close(leaf.grad, right)


@pytest.mark.parametrize("way", ["loss", "values", "held"])
@pytest.mark.parametrize("trained", ["both", "low", "high"])
def test_trained_parts_have_the_gradients_of_the_whole_weight(trained: str, way: str) -> None:
    """Of a weight with two adapters, and of its bias; in chunks."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    hidden, weight, bias = leaf(6, 5), leaf(11, 5).detach(), leaf(11)
    factors = [
        (leaf(2, 5).requires_grad_(trained != "high"), leaf(11, 2).requires_grad_(trained != "low")) for _ in "12"
    ]
    parts = tuple(LowRank(low, high, scaling) for (low, high), scaling in zip(factors, (0.5, 3.0), strict=True))
    whole = weight + sum(part.scaling * part.high @ part.low for part in parts)
    source, target = torch.tensor([0, 1, 1, 2, 4, 5]).numpy(), torch.randint(11, (6,), generator=generator)
    inputs = [each for each in (hidden, bias, *sum(factors, ())) if each.requires_grad]
    wanted = edge_values(hidden, Head(whole, bias), source, target)["log_probs"].square().sum()
    right = torch.autograd.grad(wanted, inputs, retain_graph=True)

    head = Head(whole, bias, parts=parts).collecting()
    with mock.patch.dict(lm_head.MAX_LOGITS, cpu=22):
        if way == "loss":
            loss, _ = edge_loss(hidden, head, source, target, lambda values, _: values["log_probs"].square().sum())
            loss.backward()
        elif way == "values":
            edge_values(hidden, head, source, target)["log_probs"].square().sum().backward()
        else:
            rows = torch.unique(torch.from_numpy(source))
            held = hold_logits(hidden[rows], head, np.unique(source, return_inverse=True)[1], target, ("log_probs",))
            grads = {name: 2 * value for name, value in held.values().items()}
            used, grad = held.backward(np.arange(6), grads, head)
            hidden.grad = torch.zeros_like(hidden).index_add(0, rows[torch.from_numpy(used)], grad)
    head.gradients.join()
    for each, expected in zip(inputs, right, strict=True):
        torch.testing.assert_close(each.grad, expected, rtol=0, atol=1e-11)


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


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.representatives("1-1-False", "3-1-True", "6-2-False", "10-2-True")
@pytest.mark.parametrize("is_module", [False, True])
@pytest.mark.parametrize(("num_rows", "num_threads"), [(1, 1), (2, 1), (3, 1), (5, 2), (6, 2), (7, 2), (10, 2)])
def test_gradients_of_a_few_rows_are_as_accurate_as_those_of_many(
    num_rows: int, num_threads: int, is_module: bool, threads
) -> None:
    threads(num_threads)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40_000, 16, generator=generator)
    hidden, target = torch.randn(16, 16, generator=generator), torch.randint(40_000, (16,), generator=generator)

    def error(rows: slice) -> float:
        found, exact = (gradient(rows, dtype) for dtype in (torch.float32, torch.float64))
        return ((found.double() - exact).norm() / exact.norm()).item()

    def gradient(rows: slice, dtype: torch.dtype) -> torch.Tensor:
        leaf, own = hidden[rows].to(dtype).requires_grad_(), weight.to(dtype)
        project = torch.nn.Linear(16, 40_000, bias=False)
        project.weight = torch.nn.Parameter(own)
        head = ModuleHead(project, 40_000) if is_module else Head(own)
        edge_values(leaf, head, torch.arange(len(leaf)), target[rows])["log_probs"].sum().backward()
        return leaf.grad

    many = error(slice(16))
    for first in range(0, 16 - num_rows, num_rows):
        assert error(slice(first, first + num_rows)) < 3 * many


def test_the_gradient_of_a_narrow_weight_adds_up_in_parts(monkeypatch):
    """Of a CPU and of a GPU: how many values of the weight one product covers is a figure of the device."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 8, generator=generator).bfloat16().requires_grad_()
    hidden, target = torch.randn(12, 8, generator=generator).bfloat16(), torch.arange(12)
    found = []
    for most in (lm_head.MAX_PRODUCT["cpu"], 3 * 8):
        monkeypatch.setitem(lm_head.MAX_PRODUCT, "cpu", most)
        values = edge_values(hidden, Head(weight), torch.arange(12), target)["log_probs"]
        found += torch.autograd.grad(values.sum(), [weight])
    assert (found[0] - found[1]).abs().max() <= torch.finfo(torch.bfloat16).eps * found[0].abs().max()
    assert found[0].abs().max() > 0.1
