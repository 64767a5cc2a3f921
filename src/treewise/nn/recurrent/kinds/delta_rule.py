"""Delta rules: gated delta nets (Qwen3-Next, Qwen3.5, OLMo-hybrid) and Kimi delta attention.

Yang et al., Gated Delta Networks (2024), section 3; Kimi Linear (2025), section 3. The state S [H, Dk, Dv] is decayed
by exp(g), then moved towards writing v at key k with strength beta. A row of zeros (g = 0, beta = 0, k = 0) leaves it
unchanged, so padding is zeros.
"""

from collections.abc import Callable
from typing import Any

import torch

from treewise.nn.recurrent.layer_context import LayerContext
from treewise.nn.recurrent.scan import padded_chunk, tree_scan

CHUNK = 64  # of transformers' functions and of flash-linear-attention's kernels


def tree_delta_rule(
    layer: LayerContext,
    original: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = CHUNK,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`chunk_gated_delta_rule` and `chunk_kda` on a tree: [1, T, H, ...] inputs; no end state is returned."""
    del cu_seqlens  # bounds of packed rows: a tree has its own
    assert initial_state is None
    assert not output_final_state

    def scan(
        inputs: list[torch.Tensor], initial: torch.Tensor | None, wants_states: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value, g, beta = inputs
        return original(
            query,
            key,
            value,
            g=g,
            beta=beta,
            chunk_size=padded_chunk(query.shape[1], chunk_size),
            initial_state=initial,
            output_final_state=wants_states,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **kwargs,
        )

    return tree_scan(layer, (query, key, value, g, beta), scan), None
