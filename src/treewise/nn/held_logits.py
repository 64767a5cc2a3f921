"""Log-probs of edges whose logits are held for gradients that come later: three products with the head, not four.

`nn.edge_values` projects again in its backward, so that no more than a chunk of logits is alive. Where the graphs of
layers are held anyway, as in a window, logits are a tenth of what these take.

Letters: R rows, E edges of them, U rows with a gradient, M model width, V vocabulary.
"""

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


class HeldLogits:
    """Edges from rows ([R, M], each with an edge) to tokens.

    source: [E] int64, the row of each edge, ascending. target: [E] int64 token ids. values: [E] by name, without a
    graph.
    """

    def __init__(
        self, rows: Tensor, head: AnyHead, source: np.ndarray, target: Tensor, outputs: tuple[str, ...]
    ) -> None:
        assert isinstance(head, Head)
        dtype = autocast_dtype(rows.device.type) or head.weight.dtype
        self._rows, self._source, self._target = rows.detach().to(dtype), source, target
        wide = torch.promote_types(dtype, torch.float32)
        with torch.no_grad():
            self._logits, _ = project(self._rows, head.weight.to(dtype), head.bias, wide, head)
            self._lse = over_rows(partial(torch.logsumexp, dim=1), self._logits)
            row_E = to_device(source, rows.device)
            self.values = {"log_probs": self._logits[row_E, target] - self._lse[row_E]}
            self._entropy: Tensor | None = None
            if "entropy" in outputs:
                self._entropy = self._lse - over_rows(means, self._logits, self._lse[:, None])
                self.values["entropy"] = self._entropy[row_E]

    @property
    def num_bytes(self) -> int:
        """Of the logits."""
        return self._logits.nbytes

    @torch.no_grad()
    def backward(self, edges: np.ndarray, grads: dict[str, Tensor], head: AnyHead) -> tuple[np.ndarray, Tensor]:
        """Adds gradients of the head, which collects them; returns those of the rows of these edges ([U, M]), and which
        rows these are ([U] int64, ascending).

        edges: [n] int64, ascending; all others have no gradient. grads: [n] of each value.
        """
        assert isinstance(head, Head)
        device, weight = self._rows.device, head.weight.to(self._rows.dtype)
        used, place = np.unique(self._source[edges], return_inverse=True)
        used_U, place_n, token_n = (
            to_device(used, device),
            to_device(place, device),
            self._target[to_device(edges, device)],
        )
        needs = True, head.weight.requires_grad, head.bias is not None and head.bias.requires_grad
        gradients = ChunkGradients(head, self._rows[used_U], needs, self._lse.dtype)
        logprob_grad = grads.get("log_probs")
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(next(iter(grads.values())))
        factor = head.scale / head.temperature
        size = max(1, MAX_LOGITS.get(device.type, MAX_LOGITS["cpu"]) // self._logits.shape[1])
        for start in range(0, len(used), size):
            low, high = np.searchsorted(place, (start, start + size))
            rows, part = used_U[start : start + size], place_n[low:high] - start
            zeros, entropies = self._lse.new_zeros(len(rows)), None
            if self._entropy is not None and "entropy" in grads:
                entropies = self._entropy[rows], zeros.index_add(0, part, grads["entropy"][low:high])
            own = part, token_n[low:high], logprob_grad[low:high]
            row_grad = zeros.index_add(0, part, own[2])
            logits, slope = self._logits[rows], None if factor == 1.0 else factor
            grad = gradient_of_logits(logits, slope, self._lse[rows], row_grad, own, entropies)
            gradients.add(grad, weight, start, start + len(rows))
        assert gradients.hidden is not None
        return used, gradients.hidden
