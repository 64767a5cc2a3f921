"""Log-probs of edges whose logits are held for gradients that come later: three products with the head, not four.

`nn.edge_values` projects again in its backward, so that no more than a chunk of logits is alive. Where the graphs of
layers are held anyway, as in a window, logits are a tenth of what these take.

Letters: R rows, E edges of them, U rows with a gradient, M model width, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from treewise.nn.lm_head import (
    MAX_LOGITS,
    AnyHead,
    ChunkGradients,
    Head,
    gradient_of_logits,
    means,
    over_rows,
    project,
)
from treewise.nn.platform.tensors import autocast_dtype, to_device


def can_hold(head: AnyHead) -> bool:
    """Whether logits are all that a backward needs: of one weight, on one rank, without a softcap."""
    return isinstance(head, Head) and head.shard is None and head.softcap is None


@dataclass(frozen=True, slots=True, eq=False)
class HeldLogits:
    """Edges from rows to tokens.

    source: [E] int64, the row of each edge, ascending. target: [E] int64 token ids. rows: [R, M], each with an edge.
    logits: [R, V]. lse: [R], the logarithms of their sums. entropy: [R], where it is asked for.
    """

    source: np.ndarray
    target: Tensor
    rows: Tensor
    logits: Tensor
    lse: Tensor
    entropy: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Of the logits."""
        return self.logits.nbytes

    def values(self) -> dict[str, Tensor]:
        """[E] of each edge by name, without a graph."""
        row_E = to_device(self.source, self.rows.device)
        found = {"log_probs": self.logits[row_E, self.target] - self.lse[row_E]}
        return found if self.entropy is None else found | {"entropy": self.entropy[row_E]}

    @torch.no_grad()
    def backward(self, edges: np.ndarray, grads: dict[str, Tensor], head: AnyHead) -> tuple[np.ndarray, Tensor]:
        """Adds gradients of the head, which collects them; returns those of the rows of these edges ([U, M]), and which
        rows these are ([U] int64, ascending). Once: where all rows have a gradient it takes the place of their logits.

        edges: [n] int64, ascending; all others have no gradient. grads: [n] of each value.
        """
        assert isinstance(head, Head)
        device, weight = self.rows.device, head.weight.to(self.rows.dtype)
        used, place = np.unique(self.source[edges], return_inverse=True)
        used_U, place_n, token_n = (
            to_device(used, device),
            to_device(place, device),
            self.target[to_device(edges, device)],
        )
        needs = True, head.weight.requires_grad, head.bias is not None and head.bias.requires_grad
        gradients = ChunkGradients(head, self.rows[used_U], needs, self.lse.dtype)
        logprob_grad = grads.get("log_probs")
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(next(iter(grads.values())))
        factor = head.scale / head.temperature
        size = max(1, MAX_LOGITS.get(device.type, MAX_LOGITS["cpu"]) // self.logits.shape[1])
        for start in range(0, len(used), size):
            low, high = np.searchsorted(place, (start, start + size))
            rows: Tensor | slice = used_U[start : start + size]
            if len(used) == len(self.rows):
                rows = slice(start, min(start + size, len(used)))  # a view, no copy
            num_rows, part = min(size, len(used) - start), place_n[low:high] - start
            zeros, entropies = self.lse.new_zeros(num_rows), None
            if self.entropy is not None and "entropy" in grads:
                entropies = self.entropy[rows], zeros.index_add(0, part, grads["entropy"][low:high])
            own = part, token_n[low:high], logprob_grad[low:high]
            row_grad = zeros.index_add(0, part, own[2])
            logits, slope = self.logits[rows], None if factor == 1.0 else factor
            grad = gradient_of_logits(logits, slope, self.lse[rows], row_grad, own, entropies)
            gradients.add(grad, weight, start, start + num_rows)
        assert gradients.hidden is not None
        return used, gradients.hidden


@torch.no_grad()
def hold_logits(
    rows: Tensor, head: AnyHead, source: np.ndarray, target: Tensor, outputs: tuple[str, ...]
) -> HeldLogits:
    """Projects rows ([R, M]) for values that are asked for now and gradients that come later."""
    assert isinstance(head, Head)
    dtype = autocast_dtype(rows.device.type) or head.weight.dtype
    rows = rows.detach().to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    logits, _ = project(rows, head.weight.to(dtype), head.bias, wide, head)
    lse = over_rows(partial(torch.logsumexp, dim=1), logits)
    entropy = lse - over_rows(means, logits, lse[:, None]) if "entropy" in outputs else None
    return HeldLogits(source, target, rows, logits, lse, entropy)
