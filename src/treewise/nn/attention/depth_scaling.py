"""Queries that a layer scales by their position (Llama 4's without rotary positions), for the depths of a tree.

Letters: T queries, H query heads, D head size.
"""

from typing import Any

import numpy as np
import torch

from treewise.nn.attention.mask import TreeMask
from treewise.nn.platform.tensors import to_device


def rescaled_for_depth(module: Any, query: torch.Tensor, mask: TreeMask) -> torch.Tensor:
    """Queries [1, H, T, D], scaled for the depths of their tokens instead of their rows.

    Positions reach a model as `position_ids`, and nearly all layers use nothing else. Llama 4's layers without rotary
    positions scale their queries by `log1p(floor((p + 1) / floor_scale)) * attn_scale + 1` (Nakanishi,
    Scalable-Softmax, 2025, arXiv:2501.19399) and count `p` themselves, from 0 at the first row of the call. Before
    position `floor_scale` (8192) the factor is 1, so a probe on short sequences cannot detect it.
    """
    if getattr(module, "use_rope", True):
        return query
    factor_T = mask.derived(_factors, module.floor_scale, module.attn_scale, query.device)
    return query if factor_T is None else query * factor_T[:, None].to(query.dtype)


def _factors(mask: TreeMask, floor_scale: float, attn_scale: float, device: torch.device) -> torch.Tensor | None:
    """[T] float64 factors from the scale at a query's row to the scale at its depth; None where all are 1."""
    depth_T, row_T = mask.key_depth[mask.num_gateway_keys :], np.arange(mask.num_queries)
    at_depth_T, at_row_T = (np.log1p(np.floor((at + 1.0) / floor_scale)) * attn_scale + 1.0 for at in (depth_T, row_T))
    factor_T = at_depth_T / at_row_T
    return None if (factor_T == 1).all() else to_device(factor_T, device)
