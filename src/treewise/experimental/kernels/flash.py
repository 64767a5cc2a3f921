"""FlexAttention through torch's FLASH backend, the kernels of FlashAttention 4: for half precision on Hopper and newer.

Block mask, padding and compilation are those of `flex`; the blocks are those that both directions of FlashAttention's
kernels accept: on compute capability 9.0 tiles of 128 x 128 for heads up to 128, on 10.x two tiles of 128 queries at a
time. What it needs stands in its entry of `implementations`. It has run on no GPU yet.
"""

import torch
from torch import Tensor

from treewise.base.shapes import Float
from treewise.nn.attention import flex
from treewise.nn.attention.gateway import GatewayRead, LayerCall, extend
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.needs import require_of_call
from treewise.nn.platform.card import capability_of
from treewise.nn.platform.versions import untested_torch_named

# Rows of a block of queries and of keys, by the major number of the compute capability.
BLOCKS = {9: (128, 128), 10: (256, 128)}


def attend(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 Hkv T D"],
    value: Float[Tensor, "1 Hkv T Dv"],
    mask: TreeMask,
    rule: LayerRule,
    sinks: Float[Tensor, " H"] | None = None,
    reads: tuple[GatewayRead, ...] = (),
    call: LayerCall = 0,
) -> Float[Tensor, "1 H T Dv"]:
    """Attention of a micro-batch's own tokens behind the rows that it reads from gateways.

    Raises:
        ConfigError, UnsupportedModelError: see `needs.Needs.refusal`.
    """
    require_of_call(mask, "flash", query, value, rule, sinks)
    with untested_torch_named():
        return flash_attention_tree(query, *extend(key, value, reads, call), mask, rule, sinks)


def flash_attention_tree(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 Hkv K D"],
    value: Float[Tensor, "1 Hkv K Dv"],
    mask: TreeMask,
    rule: LayerRule,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "1 H T Dv"]:
    """Attention of [1, H, T, D] queries over [1, Hkv, K, D] keys and values, as `reference_attention`."""
    blocks, backend = blocks_on(query.device), flex.FLASH
    return flex.flex_attention_tree(query, key, value, mask, rule, sinks, blocks=blocks, backend=backend)


def blocks_on(device: torch.device) -> tuple[int, int]:
    """Blocks of queries and keys for a GPU; on a CPU, where only counts and tests ask, those of Hopper."""
    capability = capability_of(device)
    return BLOCKS[9 if capability is None else capability[0]]


def num_key_rows(mask: TreeMask, device: torch.device) -> int:
    """Key rows that one layer without a window reads in a forward of a micro-batch: those of all blocks not hidden."""
    return flex.num_key_rows(mask, device, blocks_on(device))
