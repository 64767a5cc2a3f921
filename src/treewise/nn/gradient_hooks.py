"""Hooks on the gradients of parameters: when they run, where a gradient comes in parts."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from treewise.errors import ConfigError
from treewise.nn.gradients import have_hooks, moved_out

Hooks = dict[int, Callable[..., Any]]  # by number


@dataclass(frozen=True, slots=True)
class _Hooked:
    """A parameter with hooks on its gradient, each kind by number; None: none of the kind."""

    name: str
    parameter: nn.Parameter
    on_tensor: Hooks | None
    on_grad: Hooks | None

    def set(self, on_tensor: Any, on_grad: Any) -> None:
        """Never to None, which leaves hooks on accumulated gradients where they are (torch 2.13)."""
        if self.on_tensor is not None:
            self.parameter._backward_hooks = on_tensor
        if self.on_grad is not None:
            self.parameter._post_accumulate_grad_hooks = on_grad


def _hooked(model: nn.Module) -> list[_Hooked]:
    return [_Hooked(name, each, *_hooks_of(each)) for name, each in model.named_parameters() if have_hooks([each])]


def _hooks_of(parameter: nn.Parameter) -> tuple[dict[int, Any] | None, dict[int, Any] | None]:
    """Those on its gradient before it is added to `.grad`, and those after."""
    return parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)


@contextmanager
def suspended(model: nn.Module) -> Iterator[list[_Hooked]]:
    """Inside, no hook runs on the gradient of a parameter (`register_hook`, `register_post_accumulate_grad_hook`)."""
    hooked = _hooked(model)
    for each in hooked:
        each.set(OrderedDict(), OrderedDict())
    try:
        yield hooked
    finally:
        for each in hooked:
            each.set(each.on_tensor, each.on_grad)


@contextmanager
def run_once(model: nn.Module, *, scale: float = 1.0) -> Iterator[None]:
    """Hooks on parameters' gradients run when this ends, once each, on the sum of all that came inside.

    As in one backward: `register_hook` changes what came before it is added to `.grad`, then
    `register_post_accumulate_grad_hook` sees the parameter; last parameters first. A clip or a step within a
    hook would be another one on the gradient of every micro-batch. After an error none runs.

    scale: of the gradients that come inside, which hooks see without it.
    """
    with suspended(model) as hooked, moved_out(each.parameter for each in hooked) as before:
        try:
            yield
        except BaseException:
            for parameter, grad in before:
                parameter.grad = grad
            raise
    with torch.no_grad():
        for each, (parameter, earlier) in reversed([*zip(hooked, before, strict=True)]):
            came = parameter.grad
            if came is None:
                parameter.grad = earlier
                continue
            for hook in list((each.on_tensor or {}).values()):
                changed = hook(came if scale == 1.0 else came / scale)
                came = came if changed is None else changed * scale
            parameter.grad = came if earlier is None else earlier.add_(came)
            for hook in list((each.on_grad or {}).values()):
                hook(parameter)


def spare_hooks_no_gradient(parameters: Iterable[nn.Parameter]) -> None:
    """Within a backward: until it ends, hooks of parameters to which nothing came do not run, as in one graph.

    Autograd calls both kinds where a function has no gradient for one of its inputs; something may still come to
    the parameter from elsewhere in the graph, so only they can tell.
    """
    hooks_of = [(each, hooks) for each in parameters for hooks in _hooks_of(each) if hooks]
    for parameter, hooks in hooks_of:
        before = None if parameter.grad is None else (parameter.grad, parameter.grad._version)
        hooks.update({key: hook if isinstance(hook, _Spared) else _Spared(hook, before) for key, hook in hooks.items()})

    def put_back() -> None:
        for _, hooks in hooks_of:
            hooks.update({key: hook.hook for key, hook in hooks.items() if isinstance(hook, _Spared)})

    if hooks_of:
        torch.autograd.Variable._execution_engine.queue_callback(put_back)


@dataclass(frozen=True, slots=True)
class _Spared:
    """before: the accumulated gradient of earlier, and its version."""

    hook: Callable[[torch.Tensor], torch.Tensor | None]
    before: tuple[torch.Tensor, int] | None

    def __call__(self, argument: torch.Tensor | None) -> torch.Tensor | None:
        """argument: what came, or the parameter that it was added to."""
        if not isinstance(argument, nn.Parameter):
            return None if argument is None else self.hook(argument)
        grad, (earlier, version) = argument.grad, self.before or (None, 0)
        is_as_before = grad is earlier and (grad is None or grad._version == version)
        return None if is_as_before else self.hook(argument)


def refuse_hooks(model: nn.Module, why: str, *, on_any_gradient: bool = False) -> None:
    """Raises `ConfigError` if a hook waits for the accumulated gradient of a parameter; names both. why: ends it.

    on_any_gradient: hooks that change gradients on their way (`register_hook`) are refused, too.
    """
    for each in _hooked(model):
        for hook in (*(each.on_grad or {}).values(), *((each.on_tensor or {}).values() if on_any_gradient else ())):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            kind = "" if on_any_gradient else "accumulated "
            raise ConfigError(f"{each.name} has the hook {name} on its {kind}gradient, {why}")
