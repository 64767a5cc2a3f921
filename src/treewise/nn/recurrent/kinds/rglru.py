"""The real-gated linear recurrent unit of RecurrentGemma, and the convolution before it.

De et al., Griffin (2024), section 2.4: h_t = a_t h_{t-1} + x_t, channel by channel. The block's own forward runs, with
its convolution and its scan over tokens replaced.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from treewise.nn.recurrent.conv import tree_conv
from treewise.nn.recurrent.layer_context import LayerContext
from treewise.nn.recurrent.scan import tree_scan


class StandIn:
    """A module with a few attributes replaced; what its forward sets is kept here and not in the module."""

    def __init__(self, module: nn.Module, **replaced: Any) -> None:
        vars(self).update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)


def tree_recurrent_block(
    block: Any, layer_of: Callable[[str], LayerContext], *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """`RecurrentGemmaRecurrentBlock` on a tree: [1, T, M] in, ([1, T, M], None) out."""

    def conv(inputs: torch.Tensor) -> torch.Tensor:
        own = block.conv_1d
        return tree_conv(layer_of("conv"), inputs, own.kernel_size[0], lambda each: own(each)[..., : each.shape[-1]])

    def scan(
        hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, reset: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, None]:
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        is_token = hidden_states.new_ones(*hidden_states.shape[:2], 1)
        inputs = (hidden_states.to(wide), (recurrent_gate * ~reset).to(wide), is_token)
        return tree_scan(layer_of("scan"), inputs, linear_recurrence).to(hidden_states.dtype), None

    def unit(activations: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return type(block.rg_lru).forward(StandIn(block.rg_lru, _rnn_scan=scan), activations, position_ids)

    return type(block).forward(StandIn(block, conv_1d=conv, rg_lru=unit), *args, **kwargs)


def linear_recurrence(
    inputs: list[torch.Tensor], initial: torch.Tensor | None, _wants_states: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = a_t h_{t-1} + x_t over [B, L, C], by doubling (Hillis and Steele, 1986): log2(L) passes, no step per token.

    The third input is 0 at padded rows, which leave the state unchanged.
    """
    state, gate, is_token = inputs
    gate = torch.where(is_token > 0, gate, 1.0)
    reach = 1
    while reach < state.shape[1]:
        state = torch.cat([state[:, :reach], state[:, reach:] + gate[:, reach:] * state[:, :-reach]], dim=1)
        gate = torch.cat([gate[:, :reach], gate[:, reach:] * gate[:, :-reach]], dim=1)
        reach *= 2
    if initial is not None:
        state = state + gate * initial[:, None].to(state.dtype)
    return state, state[:, -1]
