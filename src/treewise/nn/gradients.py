"""The `.grad` of parameters as state: zeroed, cleared, taken, set aside and restored. The only owner of these moves."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sets `.grad` to None; an optimizer then leaves the parameters, and its own state for them, unchanged."""
    for parameter in parameters:
        parameter.grad = None


def zero_gradients(model: nn.Module) -> None:
    """Zeros that are allocated and written, for trained parameters: no timed step then pays for first-touch memory."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.zero_()


def take_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by parameter name; the parameters keep none."""
    taken = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    clear_gradients(model.parameters())
    return taken


@contextmanager
def gradients_set_aside(model: nn.Module) -> Iterator[None]:
    """Inside, gradients start at None; afterwards the earlier ones are added, or kept alone if an error was raised."""
    before = _moved_out(model)
    try:
        yield
    except BaseException:
        _put_back(before)
        raise
    for parameter, grad in before:
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)


@contextmanager
def gradients_restored(model: nn.Module) -> Iterator[None]:
    """Inside, gradients start at None; afterwards they are the earlier ones, also if an error was raised."""
    before = _moved_out(model)
    try:
        yield
    finally:
        _put_back(before)


_Kept = list[tuple[nn.Parameter, torch.Tensor | None]]


def _moved_out(model: nn.Module) -> _Kept:
    before: _Kept = [(each, each.grad) for each in model.parameters()]
    clear_gradients(model.parameters())
    return before


def _put_back(before: _Kept) -> None:
    for parameter, grad in before:
        parameter.grad = grad
