"""Values of a whole forest as one differentiable function, at any budget.

Micro-batches hand out parts: numbers of entries, and tensors for them. With one micro-batch the result is an ordinary
graph. With several, the forward runs without a graph, and the backward is the walk, which adds parameter gradients into
`.grad`; so a result may be used in any loss, more than once in a graph, and under autocast.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from treewise.engine.walk import Walk
from treewise.errors import ConfigError
from treewise.nn.device import Autocast, to_device
from treewise.nn.lm_head import CONSTANT

# What a micro-batch hands out: the numbers of its entries ([E]), and by name their values ([E, ...]).
Part = tuple[np.ndarray, dict[str, torch.Tensor]]
Read = Callable[[int, torch.Tensor], Part | None]
NewRead = Callable[[Walk], Read]


def gather(new_walk: Callable[[], Walk], new_read: NewRead, names: tuple[str, ...], length: int) -> dict[str, Any]:
    """[length, ...] tensors by name; entries that no micro-batch hands out are zero.

    new_walk: a fresh walk over the plan. new_read: for a walk, the function from a micro-batch's number and hidden rows
    to its part; values in it that carry no gradient carry none here.
    """
    walk = new_walk()
    if walk.plan.is_whole and walk.pace is None:  # else ranks would run their backwards apart
        rows = walk.whole_rows()
        return _filled([new_read(walk)(0, rows)], names, length, rows)
    if not torch.is_grad_enabled():
        return _visited(walk, new_read(walk), names, length)
    # Parameters are no inputs of the function, so something else has to ask for its backward.
    anchor = torch.zeros((), device=walk.parts.device, requires_grad=True)
    return dict(zip(names, _Gather.apply(anchor, new_walk, new_read, names, length), strict=True))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        new_walk: Callable[[], Walk],
        new_read: NewRead,
        names: tuple[str, ...],
        length: int,
    ) -> Any:
        walk = new_walk()
        ctx.new_walk, ctx.new_read, ctx.names = new_walk, new_read, names
        ctx.autocast = Autocast.now(walk.parts.device.type)
        versions = [(each, each._version) for each in walk.parts.model.parameters()]
        found = _visited(walk, new_read(walk), names, length)
        # Adapters on parameters (PEFT's for experts) count up in every forward, so these cannot be told.
        ctx.versions = [(each, version) for each, version in versions if each._version == version]
        ctx.mark_non_differentiable(*(found[name] for name in names if name in CONSTANT))
        ctx.set_materialize_grads(False)
        return tuple(found[name] for name in names)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        grad_of = {name: grad for name, grad in zip(ctx.names, grads, strict=True) if grad is not None}
        if any(each._version != version for each, version in ctx.versions):
            raise ConfigError(
                "weights were changed between the forward and the backward of values on a tree, which the backward "
                "computes again. Call backward before the optimizer's step."
            )
        walk = ctx.new_walk()
        read = ctx.new_read(walk)

        def loss_of(number: int, rows: torch.Tensor) -> torch.Tensor | None:
            part = read(number, rows)
            if part is None:
                return None
            entry = to_device(part[0], rows.device)
            shares = [
                (part[1][name] * grad[entry].to(part[1][name].dtype)).sum()
                for name, grad in grad_of.items()
                if part[1][name].requires_grad
            ]
            return torch.stack(shares).sum() if shares else None

        if grad_of:
            with torch.enable_grad(), ctx.autocast.again():
                walk.train(loss_of)
        return torch.zeros((), device=walk.parts.device), None, None, None, None


@torch.no_grad()
def _visited(walk: Walk, read: Read, names: tuple[str, ...], length: int) -> dict[str, torch.Tensor]:
    parts: list[Part | None] = []
    last: list[torch.Tensor] = []

    def use(number: int, rows: torch.Tensor) -> None:
        parts.append(read(number, rows))
        last[:] = [rows]

    walk.visit(use)
    return _filled(parts, names, length, last[0])


def _filled(
    parts: list[Part | None], names: tuple[str, ...], length: int, rows: torch.Tensor
) -> dict[str, torch.Tensor]:
    given = [part for part in parts if part is not None]
    if not given:
        # Nothing was asked for; the result still hangs on the model, so that its backward is a zero and not an error.
        wide = torch.promote_types(rows.dtype, torch.float32)
        return {name: rows.sum().to(wide) * torch.zeros(length, device=rows.device, dtype=wide) for name in names}
    index = to_device(np.concatenate([entry for entry, _ in given]), rows.device)
    filled = {}
    for name in names:
        values = torch.cat([part[name] for _, part in given])
        empty = torch.zeros(length, *values.shape[1:], dtype=values.dtype, device=values.device)
        filled[name] = empty.index_copy(0, index, values)
    return filled
