"""The `.grad` of parameters as state: cleared, set aside and restored. The only owner of these moves."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from treewise.base import features


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
    once: AbstractContextManager[None] = features.gradient_hooks.run_once(model, scale=scale)
    return once


@contextmanager
def gradients_set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, gradients start at None; afterwards the earlier ones are added, or kept alone if an error was raised."""
    with moved_out(parameters) as before:
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
    with moved_out([*model.parameters()]) as before:
        try:
            with features.gradient_hooks.suspended(model) if have_hooks(model.parameters()) else nullcontext():
                yield
        finally:
            _put_back(before)


@contextmanager
def sparse_embedding_gradients(module: Any) -> Iterator[None]:
    """On a CPU, each micro-batch's gradient of the input embedding has the rows of its tokens, not the vocabulary's.

    `.grad` itself stays dense. Embeddings of another kind (adapters, shards) stay as they are.
    """
    with embedding_rows_alone(module) as is_sparse:
        if is_sparse and module.weight.grad is None:
            module.weight.grad = zeros_of(module.weight)
        yield


@contextmanager
def embedding_rows_alone(module: Any) -> Iterator[bool]:
    """Inside, forwards of the input embedding have such gradients, if this yields True; `.grad` has to be there before
    a backward, see `sparse_embedding_gradients`."""
    weight: Any = module.weight if isinstance(module, nn.Embedding) else None
    is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu"
    if not is_plain or module.sparse or not weight.requires_grad:
        yield is_plain and weight.requires_grad
        return
    module.sparse = True
    try:
        yield True
    finally:
        module.sparse = False


_Kept = list[tuple[nn.Parameter, torch.Tensor | None]]
_elsewhere: list[dict[nn.Parameter, torch.Tensor]] = []  # gradients that are moved out, of the outermost context first


@contextmanager
def moved_out(parameters: Iterable[nn.Parameter]) -> Iterator[_Kept]:
    """Inside, gradients start at None, and `gradient_of` has the earlier ones, which the caller puts back."""
    before: _Kept = [(parameter, parameter.grad) for parameter in parameters]
    clear_gradients(parameter for parameter, _ in before)
    kept = {parameter: grad for parameter, grad in before if grad is not None}
    _elsewhere.append(kept)
    try:
        yield before
    finally:
        _elsewhere[:] = [each for each in _elsewhere if each is not kept]


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient that a parameter has, wherever it is at present."""
    return next((each[parameter] for each in _elsewhere if parameter in each), parameter.grad)


def _put_back(before: _Kept) -> None:
    for parameter, grad in before:
        parameter.grad = grad
