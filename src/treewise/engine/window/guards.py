"""What may not change while calls share: the weights, and gradients that a host zeroes or scales."""

from typing import Any

import torch
from torch import Tensor, nn

from treewise.errors import ConfigError
from treewise.nn.decoder import all_modules
from treewise.nn.gradients import gradient_of, zeros_of

_TINY = 2.0**-100  # below any gradient


class Weights:
    """The weights of a model as they were: their versions, and a number of each, for changes that count none."""

    def __init__(self, model: nn.Module) -> None:
        left_out, self._all = _counted_by_forwards(model), [*model.parameters()]
        kept = [each for each in self._all if id(each) not in left_out]
        self._versions = [(each, each._version, each.data_ptr()) for each in kept]
        self._numbers = self._some()

    def have_changed(self) -> bool:
        return any(each._version != version or each.data_ptr() != at for each, version, at in self._versions)

    def compare_values(self) -> None:
        """Raises `ConfigError` where a weight was changed past torch's count of changes (`parameter.data`)."""
        # A run that has diverged goes on, as without a window: NaN is equal to NaN here.
        if not torch.allclose(self._numbers, self._some(), rtol=0, atol=0, equal_nan=True):
            raise ConfigError(
                "weights were changed within a window, through parameter.data. End the window before they change."
            )

    @torch.no_grad()
    def _some(self) -> Tensor:
        device = self._all[0].device
        return torch.stack([_one_number(each).to(device) for each in self._all])


def _counted_by_forwards(model: nn.Module) -> set[int]:
    """Parameters (their ids) that PEFT parametrises in each forward in which their adapter is active
    (`target_parameters`, experts of a mixture): torch counts a change in each."""
    wrappers: list[Any] = [each for each in all_modules(model) if hasattr(each, "parameter_name")]
    return {id(each.get_param()) for each in wrappers if hasattr(each, "get_param")}


def _one_number(parameter: nn.Parameter) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[len(flat) // 2].float() if len(flat) and flat.is_floating_point() else torch.zeros(())


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad and each.is_leaf]


class Marker:
    """A gradient by which is noticed that a host zeroes gradients: it is set to None, or nothing is left of it.

    One that is zero would not show it, since calls by themselves may add zeros (of an adapter whose other half is
    zero). So zeros become the smallest normal number, and again zeros at the end, unless something was added.

    decoder: has the parameter, unless the head alone is trained; model: around it.
    """

    def __init__(self, decoder: nn.Module, model: nn.Module) -> None:
        trained = _trained(decoder) or _trained(model)
        self._parameter = min(trained, key=torch.Tensor.numel, default=None)
        self._grad = None if self._parameter is None else gradient_of(self._parameter)
        self._is_own = self._parameter is not None and self._grad is None
        if self._parameter is not None and self._grad is None:
            self._grad = self._parameter.grad = zeros_of(self._parameter)
        self._size = 0.0
        if self._grad is not None and not self._grad.any():
            self._size = min(torch.finfo(self._grad.dtype).tiny, 2.0**-24)
            self._grad.fill_(self._size)
        self._version = self._first = 0 if self._grad is None else self._grad._version

    def was_zeroed(self) -> bool:
        """Whether gradients were, since the last look.

        Raises:
            ConfigError: they were scaled, and nothing was added: what a window gives at its end would not be.
        """
        if self._parameter is None or self._grad is None:
            return False
        grad = gradient_of(self._parameter)
        if grad is None:
            return True
        if grad is self._grad and grad._version == self._version:
            return False
        self._grad, self._version = grad, grad._version
        if not grad.any():
            return True
        if 0 < self._size < _TINY and self._size != float(grad.abs().max()) < _TINY:
            grad.zero_()
            self._parameter.grad = None if self._is_own else grad
            raise ConfigError(
                "gradients were scaled or clipped within a window, before those of its calls were there. Leave the "
                "window (`with engine.window():`, `with sharing.window():`) first."
            )
        return False

    def remove(self) -> None:
        """Leaves what was there before, and what was added since."""
        if self._parameter is None or self._grad is None or not self._size:
            return
        if self._is_own and self._parameter.grad is self._grad and self._grad._version == self._first:
            self._parameter.grad = None
        else:
            self._grad.masked_fill_(self._grad == self._size, 0)
