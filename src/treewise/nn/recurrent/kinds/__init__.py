"""One small file per kind of recurrent layer: how its function over tokens is computed on a tree.

transformers' mixers call such functions (`causal_conv1d_fn`, `torch_chunk_gated_delta_rule`, ...) by name, whatever
kernel is behind the name. `FUNCTIONS` maps each to its replacement while a mixer runs on a tree; the replacement calls
the mixer's own function on arranged inputs. A name with `no_shortcut` is a kernel over conv and scan together, which a
tree cannot use: it returns what transformers has when no kernel is installed.

Two mixers have their recurrence written into their forward; `MIXERS` maps them to a replacement of it.
"""

from collections.abc import Callable
from typing import Any

from treewise.nn.recurrent.kinds.delta_rule import tree_delta_rule
from treewise.nn.recurrent.kinds.lightning import tree_lightning
from treewise.nn.recurrent.kinds.mamba import tree_selective_scan
from treewise.nn.recurrent.kinds.mamba2 import tree_chunk_scan
from treewise.nn.recurrent.kinds.rglru import tree_recurrent_block
from treewise.nn.recurrent.kinds.short_conv import tree_causal_conv

# (layer context, the mixer's own function) and then the function's own arguments.
TreeFunction = Callable[..., Any]


def no_shortcut(*_: Any, **__: Any) -> None:
    """Replaces fused kernels: with None the mixer calls convolution and scan one after the other."""


FUNCTIONS: dict[str, TreeFunction] = {
    "causal_conv1d_fn": tree_causal_conv,
    "torch_chunk_gated_delta_rule": tree_delta_rule,
    "chunk_kimi_delta_attention": tree_delta_rule,
    "mamba2_chunk_scan": tree_chunk_scan,
    "mamba_selective_scan": tree_selective_scan,
    "mamba2_split_conv1d_scan_combined": no_shortcut,
    "mamba_inner_fn": no_shortcut,
}
KINDS = {
    "causal_conv1d_fn": "short convolution",
    "torch_chunk_gated_delta_rule": "gated delta net",
    "chunk_kimi_delta_attention": "Kimi delta attention",
    "mamba2_chunk_scan": "Mamba2",
    "mamba_selective_scan": "Mamba",
}
# Single steps from a cache, which a mixer takes only with a cache.
SINGLE_STEPS = {
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
    "mamba2_selective_state_update",
    "mamba_selective_state_update",
}

# Class of a mixer -> (kind, what runs instead of its forward: a function of the mixer and of names to layer contexts).
MIXERS: dict[str, tuple[str, TreeFunction]] = {
    "MiniMaxLightningAttention": ("lightning attention", tree_lightning),
    "RecurrentGemmaRecurrentBlock": ("short convolution, gated linear recurrence", tree_recurrent_block),
}
