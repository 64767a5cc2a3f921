"""TRL's tree rows without its trainer: the installed `packing.py`, with torch attention in place of its GPU kernel.

TRL gathers the keys of each segment's whole path and makes one bottom-right causal call per segment.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from trl.experimental.async_grpo import packing

from treewise.logprobs import edge_values
from treewise.models import take_apart
from treewise.trajectory import Trajectory


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *_: Any,
    softmax_scale: float,
    **__: Any,
) -> torch.Tensor:
    """[T, H, D]; segments one after the other, each over the gathered keys of its path."""
    outputs = []
    q_bounds, k_bounds = cu_q.tolist(), cu_k.tolist()
    for q0, q1, k0, k1 in zip(q_bounds[:-1], q_bounds[1:], k_bounds[:-1], k_bounds[1:], strict=True):
        part = [x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1])]
        rows, columns = q1 - q0, k1 - k0
        mask = None
        if rows != columns:
            mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        out = F.scaled_dot_product_attention(
            *part, attn_mask=mask, is_causal=mask is None, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


class TrlRows:
    """One packed row of trajectories; `step` is its forward and backward of the token-mean loss."""

    def __init__(self, model: Any, trajectories: Sequence[Trajectory]) -> None:
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=_varlen_attention)
        packing.register_tree_attention()
        self.parts = take_apart(model)
        row = packing.TreeRow()
        for item in trajectories:
            mask = (item.loss_weights > 0).astype(np.int64)
            zeros = np.zeros(len(item), dtype=np.float32)
            sample = {"input_ids": item.token_ids, "completion_mask": mask, "old_log_probs": zeros}
            row.add({**sample, "advantage": 1.0, "group_id": 0})
        self.packed = row.pack()

    def step(self) -> float:
        packed, config = self.packed, self.parts.decoder.config
        before = config._attn_implementation_internal
        config._attn_implementation_internal = packing.TREE_ATTENTION
        try:
            rows = self.parts.decoder(
                input_ids=packed["input_ids"][None],
                position_ids=packed["position_ids"][None],
                use_cache=False,
                tree_kv_index=packed["tree_kv_index"],
                tree_cu_seqlens_q=packed["tree_cu_seqlens_q"],
                tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
                tree_max_seqlen_q=int(packed["tree_max_seqlens"][0]),
                tree_max_seqlen_k=int(packed["tree_max_seqlens"][1]),
            ).last_hidden_state[0]
            trained = torch.nonzero(packed["shift_labels"] != -100)[:, 0]
            logprobs = edge_values(rows, self.parts.head(), trained, packed["shift_labels"][trained])["log_probs"]
            place = torch.full((len(rows),), -1).index_put_((trained,), torch.arange(len(trained)))
            loss = -logprobs[place[packed["token_index"]]].mean()
            loss.backward()
            return float(loss.detach())
        finally:
            config._attn_implementation_internal = before
