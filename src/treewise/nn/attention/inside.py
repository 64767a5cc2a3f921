"""FlexAttention within the graph of a compiled layer, so that a layer is one graph and its host only launches.

`interface.attend` is left out of graphs, because it reads and writes gateways. A micro-batch that has none, of a model
whose layers all look back without windows, needs only its block mask. Its tables and intervals enter the graph as
tensors: no tree, length or number of blocks compiles again, and what fills rows up to whole blocks is fused with what
made them. On a CPU the operator itself stands in for the kernels, as in `flex`; Inductor has no backward of it there.

Letters as in `flex`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, no_type_check

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from treewise.nn.attention.flex import (
    BLOCK_SIZE,
    BLOCK_TENSORS,
    BLOCKS,
    MIN_HEAD_SIZE,
    TRITON,
    block_mask,
    check_offsets,
    tiles,
)
from treewise.nn.attention.gateway import NOTHING
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.platform.card import card
from treewise.nn.platform.tensors import autocast_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from treewise.nn.attention.interface import TreeContext


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """What layers read of a micro-batch. tables: of torch's block mask, by queries and then by keys. lo_L, hi_L: of
    `TreeMask`. options: of the kernels; None: the operator itself. dtype: of the autocast around it."""

    tables: tuple[Tensor, ...]
    lo_L: Tensor
    hi_L: Tensor
    options: dict[str, Any] | None
    dtype: torch.dtype | None

    @no_type_check  # traced
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[1, T, H, D] from [1, H, T, D] queries and [1, Hkv, T, D] keys and values."""
        lo_L, hi_L, tables, num_queries = self.lo_L, self.hi_L, self.tables, query.shape[2]
        num_rows, num_columns = tables[0].shape[2] * BLOCK_SIZE, tables[4].shape[2] * BLOCK_SIZE

        def tree_mask(_batch, _head, q, k):
            return (lo_L[k] <= q) & (q < hi_L[k])

        if self.dtype is not None:
            query, key, value = query.to(self.dtype), key.to(self.dtype), value.to(self.dtype)
        width = value.shape[3]
        query = _filled_up(query, num_rows - num_queries)
        key, value = (_filled_up(each, num_columns - num_queries) for each in (key, value))
        named = dict(zip(BLOCK_TENSORS, tables, strict=True))
        blocks = BlockMask(seq_lengths=(num_rows, num_columns), BLOCK_SIZE=BLOCKS, mask_mod=tree_mask, **named)
        if self.options is None:
            given = (lambda score, *_: score), blocks.as_tuple(), scaling, {}
            out, *_ = torch.ops.higher_order.flex_attention(query, key, value, *given)
        else:
            more = {"scale": scaling, "enable_gqa": True, "kernel_options": self.options}
            out = flex_attention(query, key, value, block_mask=blocks, **more)
        return out[:, :, :num_queries, :width].transpose(1, 2).contiguous()


@no_type_check  # traced
def _filled_up(tensor: Tensor, missing: int) -> Tensor:
    """With so many rows of zeros, and zeros behind heads too small for the kernels."""
    return functional.pad(tensor, (0, max(0, MIN_HEAD_SIZE - tensor.shape[3]), 0, missing))


def suits(decoder: nn.Module, configs: "list[PreTrainedConfig]") -> bool:
    """Whether all layers of a decoder look back without windows or chunks, and none is spread over ranks."""
    if any(isinstance(each, DTensor) for each in decoder.parameters()):
        return False
    for config in configs:
        if set(getattr(config, "layer_types", None) or ("full_attention",)) != {"full_attention"}:
            return False
        if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None:
            return False
        if getattr(config, "attention_chunk_size", None) is not None:
            return False
    return True


def prepared(
    context: "TreeContext", heads: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> Inside | None:
    """What layers of a micro-batch read, made once for all of them; None where it reads or leaves gateways, exchanges,
    or is not attended to by `flex`. heads: numbers of queries and of keys, sizes of keys and of values. dtype: of the
    decoder."""
    gateways = context.reads or context.writes or context.injects or context.exchange
    if context.impl != "flex" or gateways or context.carried is not NOTHING or context.mask.without_window is not None:
        return None
    return context.mask.derived(_inside, heads, device, dtype, autocast_dtype(device.type))


def _inside(
    mask: TreeMask,
    counts: tuple[int, int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
) -> Inside:
    heads, key_heads, size, value_size = counts
    rows = mask.num_queries
    keys, values = torch.Size((1, key_heads, rows, size)), torch.Size((1, key_heads, rows, value_size))
    check_offsets(torch.Size((1, heads, rows, size)), keys, values, BLOCKS)
    blocks = block_mask(mask, LayerRule(1.0), device)
    missing = blocks.seq_lengths[1] - mask.num_keys
    lo_K, hi_K, _ = mask.on(device)
    options = None
    if device.type == "cuda":
        of_card = tiles(autocast or dtype, (size, value_size), card(device))
        options = {"BACKEND": TRITON, "IS_DIVISIBLE": True, **of_card}
    tables = tuple(getattr(blocks, name) for name in BLOCK_TENSORS)
    return Inside(tables, functional.pad(lo_K, (0, missing)), functional.pad(hi_K, (0, missing)), options, autocast)
