"""Log-probs of edges whose gradients come later, as values of a graph: the backward computes their logits again.

It takes the logits of the last chunk over from the forward if no other forward came between (`_kept`), and projects the
other chunks again, so memory stays at `chunk x vocabulary`. Letters as in `lm_head`.
"""

import weakref
from dataclasses import dataclass
from functools import partial

import torch

from treewise.base.shapes import Context
from treewise.nn.lm_head import Bounds, ChunkGradients, Head, gradient_of_logits, means, over_rows, project
from treewise.nn.platform.tensors import autocast_dtype


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Kept:
    """logits: [R, V], which the backward may overwrite; None where they are gone."""

    logits: torch.Tensor | None


# By device: the logits of the last chunk of the latest forward, for its backward, which mostly comes next. The graph of
# that forward owns them.
_latest: "dict[torch.device, weakref.ref[_Kept]]" = {}


def _kept(logits: torch.Tensor | None, device: torch.device) -> _Kept:
    """What the caller keeps for its backward, in place of what the latest forward kept; logits: None: nothing is.

    One chunk is alive in a forward and in a backward in any case, so keeping one between them adds nothing to their
    peak. Those of a forward whose backward comes after other forwards do not pile up.
    """
    latest = _latest[device]() if device in _latest else None
    if latest is not None:
        latest.logits = None
    kept = _Kept(logits)
    _latest[device] = weakref.ref(kept)
    return kept


class EdgeValues(torch.autograd.Function):
    """The log-prob of each edge, and the entropy of each row, from projected rows; see `lm_head.AnyHead`."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        edge_row: torch.Tensor,
        target: torch.Tensor,
        head: Head,
        how: tuple[list[Bounds], bool],  # and whether entropies are wanted
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bounds, with_entropy = how
        dtype = autocast_dtype(hidden.device.type) or weight.dtype  # hidden rows may be kept wider (Mamba)
        hidden = hidden.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        target_E = hidden.new_empty(len(target), dtype=wide)  # logits
        lse_R = hidden.new_empty(len(hidden), dtype=wide)
        mean_R = hidden.new_empty(len(hidden) if with_entropy else 0, dtype=wide)
        cast_weight = weight.to(dtype)
        column_E, is_own_E = (target, None) if head.shard is None else head.shard.local(target)
        _kept(None, hidden.device)
        for (start, end), (low, high) in bounds:
            logits, _ = project(hidden[start:end], cast_weight, bias, wide, head)
            lse_R[start:end] = over_rows(partial(torch.logsumexp, dim=1), logits)
            target_E[low:high] = logits[edge_row[low:high] - start, column_E[low:high]]
            if with_entropy:
                mean_R[start:end] = over_rows(means, logits, lse_R[start:end, None])
        if head.shard is not None and is_own_E is not None:
            target_E = torch.where(is_own_E, target_E, 0)
            target_E, lse_R, mean_R = head.shard.combined(target_E, lse_R, mean_R)
        log_probs_E = target_E - lse_R[edge_row]
        entropy_R = lse_R - mean_R if with_entropy else mean_R
        ctx.save_for_backward(hidden, weight, bias, edge_row, column_E, is_own_E, lse_R, entropy_R)
        ctx.head, ctx.bounds, ctx.with_entropy = head, bounds, with_entropy
        has_backward = head.softcap is None and any(ctx.needs_input_grad)
        ctx.kept = _kept(logits if has_backward else None, hidden.device)
        ctx.set_materialize_grads(False)
        return log_probs_E, entropy_R

    @staticmethod
    def backward(
        ctx: Context, logprob_grad: torch.Tensor | None, entropy_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, edge_row, column, is_own, lse, entropy = ctx.saved_tensors
        wide = lse.dtype
        head: Head = ctx.head
        if logprob_grad is None:
            logprob_grad = torch.zeros(len(column), dtype=wide, device=hidden.device)
        if not ctx.with_entropy:
            entropy_grad = None
        row_grad = torch.zeros_like(lse).index_add_(0, edge_row, logprob_grad)
        if is_own is not None:
            logprob_grad = torch.where(is_own, logprob_grad, 0)
        cast_weight = weight.to(hidden.dtype)
        gradients = ChunkGradients(head, hidden, ctx.needs_input_grad, wide)
        kept, ctx.kept.logits = ctx.kept.logits, None
        factor = head.scale / head.temperature
        bounds: list[Bounds] = ctx.bounds
        for (start, end), (low, high) in reversed(bounds):
            slope: torch.Tensor | float | None
            if kept is None:
                logits, slope = project(hidden[start:end], cast_weight, bias, wide, head, with_slope=True)
            else:  # of a head without a softcap
                logits, slope, kept = kept, None if factor == 1.0 else factor, None
            entropies = None
            if entropy_grad is not None:
                entropies = entropy[start:end], entropy_grad[start:end]
            edges = edge_row[low:high] - start, column[low:high], logprob_grad[low:high]
            grad = gradient_of_logits(logits, slope, lse[start:end], row_grad[start:end], edges, entropies)
            del logits, slope  # a chunk, which the next turn and products in half precision need not find alive
            gradients.add(grad, cast_weight, start, end)
            del grad
        if head.shard is not None and gradients.hidden is not None:
            head.shard.add_up(gradients.hidden)
        return gradients.hidden, *gradients.of_head(), None, None, None, None
