"""The `.grad` of parameters as state: cleared, set aside and restored. The only owner of these moves."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from treewise.base.features import feature


def sum_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    """From now on the gradients of trained parameters in 16 bits are added up in float32, where there are none yet.

    A sum of many small parts in bfloat16 loses all that is below 1/256 of what is there: of 300 equal parts a quarter
    arrived.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None and parameter.dtype.itemsize < torch.float32.itemsize:
            parameter.grad_dtype = torch.float32


def end_sum_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    """Rounds the sums of `sum_in_float32` to the dtype of their parameters, which optimizers ask for, one by one."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            grad, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = grad.to(parameter.dtype)


def zeros_of(parameter: nn.Parameter) -> torch.Tensor:
    """A gradient of zeros, in the dtype in which it is added up."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Of the gradients that trained parameters are still going to have."""
    missing = (parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None)
    return sum(each.numel() * (each.grad_dtype or each.dtype).itemsize for each in missing)


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sets `.grad` to None; an optimizer then leaves the parameters, and its own state for them, unchanged."""
    for parameter in parameters:
        parameter.grad = None


def have_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a gradient has hooks (`register_hook`, `register_post_accumulate_grad_hook`; `nn.gradient_hooks`)."""
    return any(each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters)


def hooks_run_once(
    model: nn.Module, parameters: Iterable[nn.Parameter] | None = None, *, scale: float = 1.0
) -> AbstractContextManager[None]:
    """Hooks on gradients, where there are some, run once, when this ends: see `nn.gradient_hooks.run_once`.

    parameters: the model's, where they are known.
    """
    if not have_hooks(model.parameters() if parameters is None else parameters):
        return nullcontext()
    once: AbstractContextManager[None] = feature("gradient_hooks").run_once(model, scale=scale)
    return once


@contextmanager
def gradients_set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, gradients start at None; afterwards the earlier ones are added, or kept alone if an error was raised."""
    before = _moved_out(parameters)
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
    """Inside, gradients start at None and hooks on them do not run; afterwards they are the earlier ones, also if an
    error was raised."""
    before = _moved_out([*model.parameters()])
    try:
        with feature("gradient_hooks").suspended(model) if have_hooks(model.parameters()) else nullcontext():
            yield
    finally:
        _put_back(before)


@contextmanager
def sparse_embedding_gradients(module: Any) -> Iterator[None]:
    """On a CPU, each micro-batch's gradient of the input embedding has the rows of its tokens, not the vocabulary's.

    `.grad` itself stays dense. Embeddings of another kind (adapters, shards) stay as they are.
    """
    weight: Any = module.weight if isinstance(module, nn.Embedding) else None
    is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu"
    if not is_plain or module.sparse or not weight.requires_grad:
        yield
        return
    if weight.grad is None:
        weight.grad = zeros_of(weight)
    module.sparse = True
    try:
        yield
    finally:
        module.sparse = False


_Kept = list[tuple[nn.Parameter, torch.Tensor | None]]


def _moved_out(parameters: Sequence[nn.Parameter]) -> _Kept:
    before: _Kept = [(parameter, parameter.grad) for parameter in parameters]
    clear_gradients(parameters)
    return before


def _put_back(before: _Kept) -> None:
    for parameter, grad in before:
        parameter.grad = grad
