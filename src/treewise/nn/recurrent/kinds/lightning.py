"""Lightning attention (MiniMax): linear attention whose state decays by a constant per head.

Qin et al., Lightning Attention-2 (2024), section 3: S_t = exp(-slope) S_{t-1} + k_t v_t, o_t = q_t S_t. The mixer's own
forward contains this recurrence, so its steps are called here one by one.
"""

from collections.abc import Callable
from typing import Any

import torch

from treewise.nn.recurrent.layer_context import LayerContext
from treewise.nn.recurrent.scan import tree_scan


def tree_lightning(
    mixer: Any, layer_of: Callable[[str], LayerContext], hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """`MiniMaxLightningAttention` on a tree: [1, T, M] in, ([1, T, M], None) out."""
    shape = (*hidden_states.shape[:2], mixer.num_attention_heads, 3 * mixer.head_dim)
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states)).reshape(shape)
    query, key, value = qkv.split(mixer.head_dim, dim=3)
    slope_H = mixer.slope_rate.flatten().to(torch.promote_types(qkv.dtype, torch.float32))
    decay = (-slope_H).expand(*shape[:3])

    def scan(
        inputs: list[torch.Tensor], initial: torch.Tensor | None, _wants_states: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value, decay = inputs
        return decayed_attention(query, key, value, decay, initial, mixer.block_size)

    out = tree_scan(layer_of("lightning"), (query, key, value, decay), scan).flatten(2)
    out = mixer.norm(out)
    out = torch.sigmoid(mixer.output_gate(hidden_states)) * out
    return mixer.out_proj(out), None


def decayed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    initial: torch.Tensor | None,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of linear attention: [B, L, H, D] each, [B, L, H] log decays; [B, L, H, D] and end states [B, H, D, D].

    A row of zeros (no key, no decay) leaves the state unchanged.
    """
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    decay = decay.transpose(1, 2)
    batch, heads, length, width = key.shape
    state = key.new_zeros(batch, heads, width, value.shape[-1]) if initial is None else initial.to(key.dtype)
    outs = []
    for start in range(0, length, block_size):
        part = slice(start, start + block_size)
        q, k, v = query[:, :, part], key[:, :, part], value[:, :, part]
        total = decay[:, :, part].cumsum(-1)
        between = (total[..., :, None] - total[..., None, :]).tril()
        seen = between.exp().tril().to(q.dtype)
        since = total.exp().to(q.dtype)[..., None]
        left = (total[..., -1:] - total).exp().to(q.dtype)[..., None]
        outs.append((q @ k.transpose(-1, -2) * seen) @ v + (q * since) @ state)
        state = state * since[..., -1:, :] + (k * left).transpose(-1, -2) @ v
    return torch.cat(outs, dim=2).transpose(1, 2), state
