"""Mamba2's scan (Nemotron-H, Granite-hybrid, Bamba, Falcon-H1, Zamba2).

Dao and Gu, Transformers are SSMs (2024), section 6. The state [H, P, N] is decayed by exp(dt A) and gains dt B x. Step
sizes are computed here, so that padding can have dt = 0, which leaves the state unchanged.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from treewise.nn.recurrent.layer_context import LayerContext
from treewise.nn.recurrent.scan import padded_chunk, tree_scan


def tree_chunk_scan(
    layer: LayerContext,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """`mamba_chunk_scan_combined` on a tree: [1, T, H, P] inputs, [1, T, H] dt, [1, T, G, N] B and C."""
    assert initial_states is None
    assert not return_final_states
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit)

    def scan(
        inputs: list[torch.Tensor], initial: torch.Tensor | None, wants_states: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden_states, dt, B, C = inputs
        result = original(
            hidden_states,
            dt,
            A,
            B,
            C,
            chunk_size=padded_chunk(dt.shape[1], chunk_size),
            initial_states=initial,
            return_final_states=wants_states,
            **kwargs,
        )
        return result if wants_states else (result, None)

    return tree_scan(layer, (hidden_states, dt, B, C), scan)
