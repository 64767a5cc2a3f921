"""The whole gradient of a model: copied, taken, zeroed, and compared with another.

Tolerances. float32: 1e-5 for the whole gradient; rounding alone gives 3e-7 on tiny models and 3e-6 on SmolLM2-135M,
whose flat gradient is as far from float64. float64: 1e-6, because transformers computes norms in float32 in most
models whatever the dtype, so gradients are rounded there (5e-8 on a small Llama whose log-probs agree to 1e-15).
bfloat16 and float16: rounding is larger than any fixed tolerance that still detects faults, so a tree may deviate from
flat training in float32 1.5 times as much as flat training in low precision does.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from treewise.nn.gradients import clear_gradients, zeros_of

Gradients = dict[str, torch.Tensor]  # by the name of the parameter

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
LOW_PRECISION = (torch.bfloat16, torch.float16)
MAX_TIMES_FLAT = 1.5


def gradients_of(model: nn.Module, device: torch.device | None = None) -> Gradients:
    """Copies of the gradients that a model has. device: where to; None: where they are."""
    found = {name: each.grad.detach() for name, each in model.named_parameters() if each.grad is not None}
    return {name: grad.to(grad.device if device is None else device, copy=True) for name, grad in found.items()}


def gradient_error(
    computed: Gradients, expected: Gradients, add_up: Callable[..., list[float]] = lambda *own: [*own]
) -> float:
    """Norm of the difference of the whole gradient over the norm of the expected one; a missing one counts as zero.

    On the devices of the computed ones. add_up: numbers of this process's parts to their sums over all.
    """
    difference = norm = 0.0
    for name in computed.keys() | expected.keys():
        some = computed.get(name, expected.get(name))
        assert some is not None
        left, right = (
            each[name].to(some.device).double() if name in each else torch.zeros_like(some, dtype=torch.float64)
            for each in (computed, expected)
        )
        difference += float((left - right).square().sum())
        norm += float(right.square().sum())
    difference, norm = add_up(difference, norm)
    return float((difference / norm) ** 0.5) if norm else math.nan


def zero_gradients(model: nn.Module) -> None:
    """Zeros for trained parameters, allocated and written, so that no timed step touches memory for the first time."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = zeros_of(parameter)
            parameter.grad.zero_()


def take_gradients(model: nn.Module) -> Gradients:
    """Gradients by parameter name; the parameters keep none."""
    taken = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    clear_gradients(model.parameters())
    return taken
