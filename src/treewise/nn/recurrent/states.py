"""Moving rows and states between segments and through gateways, with exact gradients.

Letters: T rows, Z padded positions, n states.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from treewise.nn.attention.gateway import Gateway
from treewise.shapes import Float, Int


class _Spread(torch.autograd.Function):
    """[T, ...] rows to padded positions, zeros where `order` is -1; `position` is the inverse."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order, position)
        return _spread(rows, order, position)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _, position = ctx.saved_tensors
        return grad.index_select(0, position), None, None


class _Collect(torch.autograd.Function):
    """The transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, order: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order, position)
        return padded.index_select(0, position)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _spread(grad, *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    """Rows by index, any number of times each; gradients of one row are summed in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.num_rows, *grad.shape[1:], dtype=wide, device=grad.device)
        return total.index_add_(0, index, grad.to(wide)).to(grad.dtype), None


class _Enter(torch.autograd.Function):
    """States kept by gateways, to which their gradients are added. Anchors only make the result differentiable."""

    @staticmethod
    def forward(
        ctx: Any, name: str, reads: Sequence[tuple[Gateway, torch.Tensor]], device: torch.device, *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.name, ctx.reads = name, reads
        return torch.cat([each.states[name].index_select(0, index).to(device) for each, index in reads])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        start = 0
        for gateway, index in ctx.reads:
            gateway.add_state_gradients(ctx.name, index, grad[start : start + len(index)])
            start += len(index)
        return (None,) * len(ctx.needs_input_grad)


class _Leave(torch.autograd.Function):
    """`out`, whose backward also gives `states` the gradients collected in the gateway."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, states: torch.Tensor, gateway: Gateway, name: str) -> torch.Tensor:
        ctx.gateway, ctx.name, ctx.dtype, ctx.device = gateway, name, states.dtype, states.device
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        states = ctx.gateway.state_grads.get(ctx.name)
        return grad, None if states is None else states.to(ctx.device, ctx.dtype), None, None


def spread(
    rows: Float[Tensor, "T ..."], order: Int[Tensor, " Z"], position: Int[Tensor, " T"]
) -> Float[Tensor, "Z ..."]:
    """[Z, ...] rows at their padded positions, zeros elsewhere. Each row has one: gradients are copies."""
    return _Spread.apply(rows, order, position)


def collect(
    padded: Float[Tensor, "Z ..."], order: Int[Tensor, " Z"], position: Int[Tensor, " T"]
) -> Float[Tensor, "T ..."]:
    """[T, ...] rows from their padded positions."""
    return _Collect.apply(padded, order, position)


def gather(rows: Float[Tensor, "T ..."], index: Int[Tensor, " n"]) -> Float[Tensor, "n ..."]:
    """Rows by index; a row may be taken several times; its gradients are summed in float32 or wider."""
    return _Gather.apply(rows, index)


def enter(
    name: str, reads: Sequence[tuple[Gateway, torch.Tensor]], device: torch.device, anchors: Sequence[torch.Tensor]
) -> Float[Tensor, "n ..."]:
    """[n, ...] states kept by gateways. anchors: what the layer computes with; if one needs gradients, so do states."""
    return _Enter.apply(name, tuple(reads), device, *anchors)


def leave(
    out: Float[Tensor, "..."], states: Float[Tensor, "n ..."], gateway: Gateway, name: str
) -> Float[Tensor, "..."]:
    """`out` unchanged; the backward adds the gradients collected in `gateway` to those of `states`."""
    return _Leave.apply(out, states, gateway, name)


def _spread(rows: torch.Tensor, order: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    padded = rows.new_zeros(len(order), *rows.shape[1:])
    return padded.index_copy_(0, position, rows)
