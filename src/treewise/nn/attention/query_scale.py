"""Layers that take a token's position from its place among the rows, which on a tree is another number.

Positions reach a model as `position_ids`, and nearly all layers use nothing else. Llama 4's layers without rotary
positions scale their queries by `log1p(floor((p + 1) / floor_scale)) * attn_scale + 1` (Nakanishi, Scalable-Softmax,
2025, arXiv:2501.19399) and count `p` themselves, from 0 at the first row of the call. Nothing shows before position
`floor_scale` (8192), so no probe can find it.
"""

from typing import Any

import numpy as np
import torch

from treewise.nn.attention.mask import TreeMask
from treewise.nn.device import to_device


def at_depth(module: Any, query: torch.Tensor, mask: TreeMask) -> torch.Tensor:
    """Queries [1, H, T, D] as the layer would have made them, had it known the depths of its rows."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    key = ("temperature", module.floor_scale, module.attn_scale, query.device)
    if key not in mask.cache:
        depth_T = mask.key_depth[mask.num_gateway_keys :]
        scale_T = _scale(module, depth_T) / _scale(module, np.arange(mask.num_queries))
        mask.cache[key] = None if (scale_T == 1).all() else to_device(scale_T, query.device)
    factor_T = mask.cache[key]
    return query if factor_T is None else query * factor_T[:, None].to(query.dtype)


def _scale(module: Any, position: np.ndarray) -> np.ndarray:
    """[T] float64 factors of the queries at these positions."""
    return np.log1p(np.floor((position + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
