"""Gradients cleared, zeroed, taken, set aside and restored."""

import pytest
import torch
from torch import nn

from treewise.nn.gradients import clear_gradients, gradients_restored, gradients_set_aside
from treewise.nn.whole_gradients import take_gradients, zero_gradients


@pytest.fixture
def model() -> nn.Linear:
    """A weight with a gradient of ones, a bias without."""
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    return model


def test_cleared(model: nn.Linear) -> None:
    clear_gradients(model.parameters())
    assert model.weight.grad is None


def test_zeros_for_trained_parameters_alone(model: nn.Linear) -> None:
    before = model.weight.grad
    zero_gradients(model)
    assert model.weight.grad is before
    assert not before.any()
    assert model.bias.grad is not None
    model.requires_grad_(False)
    model.bias.grad = None
    zero_gradients(model)
    assert model.bias.grad is None


def test_taken(model: nn.Linear) -> None:
    before = model.weight.grad
    assert take_gradients(model) == {"weight": before}
    assert model.weight.grad is None


def test_set_aside_and_added(model: nn.Linear) -> None:
    with gradients_set_aside([*model.parameters()]):
        assert model.weight.grad is None
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0))
    assert torch.equal(model.bias.grad, torch.ones(2))


def test_set_aside_and_kept_alone_after_an_error(model: nn.Linear) -> None:
    def backward_and_fail() -> None:
        with gradients_set_aside([*model.parameters()]):
            model(torch.ones(1, 2)).sum().backward()
            raise KeyError

    with pytest.raises(KeyError):
        backward_and_fail()
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
    assert model.bias.grad is None


@pytest.mark.parametrize("fails", [False, True])
def test_restored_whatever_happens(model: nn.Linear, fails: bool) -> None:
    before = model.weight.grad
    try:
        with gradients_restored(model):
            assert model.weight.grad is None
            model(torch.ones(1, 2)).sum().backward()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert model.weight.grad is before
    assert torch.equal(before, torch.ones(2, 2))
    assert model.bias.grad is None
