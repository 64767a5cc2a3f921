"""Short causal convolutions: LFM2's token mixer, and the first step of delta nets and Mamba."""

from collections.abc import Callable
from typing import Any

import torch

from treewise.nn.recurrent.conv import tree_conv
from treewise.nn.recurrent.layer_context import LayerContext


def tree_causal_conv(
    layer: LayerContext,
    original: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """`causal_conv1d_fn` on a tree: [1, C, T] inputs, [C, width] weight."""
    return tree_conv(layer, hidden_states, weight.shape[-1], lambda each: original(each, weight, *args, **kwargs))
