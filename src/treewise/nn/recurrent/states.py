"""Moving rows and states between segments and through gateways, with exact gradients.

Letters: T rows, Z padded positions, n states.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treewise.nn.attention.gateway import Gateway
from treewise.shapes import Context, Float, Int


def spread(
    rows: Float[Tensor, "T ..."], order: Int[Tensor, " Z"], position: Int[Tensor, " T"]
) -> Float[Tensor, "Z ..."]:
    """[Z, ...] rows at their padded positions, zeros where `order` is -1; `position` is the inverse. Each row has one
    position: gradients are copies."""
    return _Spread.apply(rows, order, position)


def collect(
    padded: Float[Tensor, "Z ..."], order: Int[Tensor, " Z"], position: Int[Tensor, " T"]
) -> Float[Tensor, "T ..."]:
    """[T, ...] rows from their padded positions: the transpose of `spread`."""
    return _Collect.apply(padded, order, position)


def gather(rows: Float[Tensor, "T ..."], index: Int[Tensor, " n"]) -> Float[Tensor, "n ..."]:
    """Rows by index; a row may be taken several times; its gradients are summed in float32 or wider."""
    return _Gather.apply(rows, index)


def enter(
    name: str, reads: Sequence[tuple[Gateway, torch.Tensor]], device: torch.device, anchors: Sequence[torch.Tensor]
) -> Float[Tensor, "n ..."]:
    """[n, ...] states kept by gateways, to which their gradients are added. anchors: what the layer computes with; if
    one needs gradients, so do states."""
    return _Enter.apply(name, tuple(reads), device, *anchors)


def leave(
    out: Float[Tensor, "..."], states: Float[Tensor, "n ..."], gateway: Gateway, name: str
) -> Float[Tensor, "..."]:
    """`out` unchanged; the backward adds the gradients collected in `gateway` to those of `states`."""
    return _Leave.apply(out, states, gateway, name)


def _padded(rows: torch.Tensor, order: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return rows.new_zeros(len(order), *rows.shape[1:]).index_copy_(0, position, rows)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows: torch.Tensor, order: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(position)
        return _padded(rows, order, position)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, padded: torch.Tensor, order: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order, position)
        return padded.index_select(0, position)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _padded(grad, *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(ctx.num_rows, *grad.shape[1:], dtype=wide, device=grad.device)
        (index,) = ctx.saved_tensors
        return total.index_add_(0, index, grad.to(wide)).to(grad.dtype), None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, name: str, reads: Sequence[tuple[Gateway, torch.Tensor]], device: torch.device, *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.name, ctx.reads = name, reads
        return torch.cat([each.states[name].index_select(0, index).to(device) for each, index in reads])

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[None, ...]:
        parts = grad.split([len(index) for _, index in ctx.reads])
        for (gateway, index), part in zip(ctx.reads, parts, strict=True):
            gateway.add_state_gradients(ctx.name, index, part)
        return (None,) * len(ctx.needs_input_grad)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, out: torch.Tensor, states: torch.Tensor, gateway: Gateway, name: str) -> torch.Tensor:
        ctx.gateway, ctx.name, ctx.dtype, ctx.device = gateway, name, states.dtype, states.device
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        states = ctx.gateway.state_grads.get(ctx.name)
        return grad, None if states is None else states.to(ctx.device, ctx.dtype), None, None
