"""Mamba's selective scan (Jamba, Zamba, Mamba, Falcon-Mamba).

Gu and Dao, Mamba (2023), section 3: h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t. The kernels and
transformers' function begin with h = 0 and take no other state. The recurrence is linear in h, so the contribution of
an initial state h_0 is added afterwards: C_t exp(A sum of dt up to t) h_0 to the outputs, exp(A sum of all dt) h_0 to
the end state. The end state is computed here, because the kernel's carries no gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from treewise.nn.recurrent.layer_context import LayerContext
from treewise.nn.recurrent.scan import tree_scan


def tree_selective_scan(
    layer: LayerContext,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """`selective_scan_fn` on a tree: [1, C, T] inputs, dt and z, [C, N] A, [1, N, T] B and C."""
    assert not return_last_state
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)

    def scan(
        inputs: list[torch.Tensor], initial: torch.Tensor | None, wants_states: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, dt, B, C = (each.transpose(1, 2) for each in inputs)
        out = original(x, dt, A, B, C, **kwargs)
        total = dt.to(torch.promote_types(dt.dtype, torch.float32)).cumsum(-1)
        if initial is not None:
            out = out + _carried(total, A, C, initial).to(out.dtype)
        return out.transpose(1, 2), _end_state(x, dt, total, A, B, initial) if wants_states else None

    over_rows = [each.transpose(1, 2) for each in (hidden_states, dt, B, C)]
    out = tree_scan(layer, over_rows, scan).transpose(1, 2)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    return out if z is None else out * F.silu(z)


def _carried(total: torch.Tensor, A: torch.Tensor, C: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    """[B, C, L], the contribution of an initial state to the outputs. total: [B, C, L] sums of dt; A is negative."""
    wide = torch.promote_types(initial.dtype, torch.float32)
    decayed = torch.exp(total[..., None].to(wide) * A[:, None].to(wide)) * initial[:, :, None].to(wide)
    return torch.einsum("bcln,bnl->bcl", decayed, C.to(wide))


def _end_state(
    x: torch.Tensor,
    dt: torch.Tensor,
    total: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    initial: torch.Tensor | None,
) -> torch.Tensor:
    """[B, C, N] in float32 or wider. Every term decays by exp(A times the sum of the later dt), at most 1."""
    wide = torch.promote_types(A.dtype, torch.float32)
    left = total[..., -1:] - total
    decay = torch.exp(left[..., None].to(wide) * A[:, None].to(wide))
    gained = (dt.to(wide) * x.to(wide))[..., None] * B.transpose(1, 2)[:, None].to(wide)
    end = (decay * gained).sum(2)
    if initial is not None:
        end = end + torch.exp(total[..., -1:].to(wide) * A.to(wide)) * initial.to(wide)
    return end
