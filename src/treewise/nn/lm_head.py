"""Log-probs of edges from hidden rows, in chunks, never holding the logits of more than one chunk.

A fork has one hidden row and several targets: its row is projected once. Rows without a needed target are not
projected at all. The backward is written by hand: it projects each chunk again, so memory stays at `chunk x
vocabulary`.

Letters: R projected rows, E edges, M model width, V vocabulary.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from treewise.errors import ConfigError
from treewise.nn.device import to_device

# What can be had of an edge, differentiable ones first; the names are TRL's. See `edge_values`.
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_PER_EDGE = ("log_probs", "is_top1")  # the others belong to the hidden row, whatever its targets
CONSTANT = OUTPUTS[2:]  # without gradients
# Logits alive at a time: 64 MiB of float32 on a CPU, where caches are small; 512 MiB on a GPU.
MAX_LOGITS = {"cpu": 2**24, "cuda": 2**27}

Bounds = tuple[tuple[int, int], tuple[int, int]]  # of a chunk: its rows, and its edges


@dataclass(frozen=True, slots=True)
class Head:
    """How a model turns hidden rows into logits: `softcap * tanh(scale * (h W^T + b) / softcap) / temperature`.

    gradients: where those of weight and bias are kept until the caller joins them; None: autograd's way.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    gradients: "HeadGradients | None" = None

    def collecting(self) -> "Head":
        """The same head, off the graph behind it; `gradients.join()` hands its gradients to that graph."""
        weight = self.weight.detach().requires_grad_(self.weight.requires_grad)
        bias = None if self.bias is None else self.bias.detach().requires_grad_(self.bias.requires_grad)
        return replace(self, weight=weight, bias=bias, gradients=HeadGradients(self))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., V] in float32 or wider."""
        raw = torch.nn.functional.linear(hidden, self.weight, self.bias)
        return _finish(raw.to(torch.promote_types(raw.dtype, torch.float32)), self)[0]


class HeadGradients:
    """Gradients of a head's weight and bias over many micro-batches, in float32 or wider.

    They are as large as the vocabulary however small a micro-batch is, so making and adding them anew for each would
    cost more than the micro-batch itself.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._sums: dict[str, torch.Tensor] = {}

    def sum(self, name: str, wide: torch.dtype) -> torch.Tensor:
        """What is collected so far of `weight` or `bias`, to be added to in place."""
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(getattr(self._head, name), dtype=wide)
        return self._sums[name]

    def join(self) -> None:
        """Adds everything to the gradients of the parameters behind the head."""
        tensors = [getattr(self._head, name) for name in self._sums]
        if tensors:
            grads = [total.to(each.dtype) for each, total in zip(tensors, self._sums.values(), strict=True)]
            torch.autograd.backward(tensors, grads)
        self._sums.clear()


def edge_values(
    hidden: torch.Tensor,
    head: Head,
    source: np.ndarray | torch.Tensor,
    target: torch.Tensor,
    outputs: tuple[str, ...] = ("log_probs",),
    max_logits: int | None = None,
) -> dict[str, torch.Tensor]:
    """What a model says about `target[e]`, predicted from hidden row `source[e]`; several targets may share a row.

    hidden: [T, M]. source: [E] int64, ascending; best an array, since of a tensor on a GPU the host has to wait for the
    values. target: [E] int64 token ids. outputs: names out of `OUTPUTS`:

    * `log_probs`: natural log-prob of the target; always computed, differentiable.
    * `entropy`: of the predicting distribution, in nats; differentiable.
    * `log_sum_sq_probs`: log of the sum of squared probabilities.
    * `mean_logits`: mean of the logits over the vocabulary, after scale, softcap and temperature.
    * `is_top1`: whether the target is the most likely token (the first one of several), bool.

    Returns [E] tensors by name, float32 (float64 for float64 models) but for `is_top1`.
    """
    if not set(outputs) <= set(OUTPUTS):
        raise ConfigError(f"unknown outputs {sorted(set(outputs) - set(OUTPUTS))}; choose out of {', '.join(OUTPUTS)}.")
    if len(source) == 0:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        empty = hidden.sum() * torch.zeros(0, dtype=wide, device=hidden.device)
        return {name: empty.bool() if name == "is_top1" else empty for name in outputs}
    source_E = source.cpu().numpy() if isinstance(source, torch.Tensor) else source
    is_first_E = np.diff(source_E, prepend=-1) != 0
    row_E = np.cumsum(is_first_E) - 1
    limit = max_logits or MAX_LOGITS.get(hidden.device.type, MAX_LOGITS["cpu"])
    bounds = _chunk_bounds(row_E, max(1, limit // head.weight.shape[0]))
    edge_row = to_device(row_E, hidden.device)
    projected = hidden.index_select(0, to_device(source_E[is_first_E], hidden.device))
    found = _EdgeValues.apply(projected, head.weight, head.bias, edge_row, target, head, bounds, tuple(outputs))
    values = dict(zip(OUTPUTS, found, strict=True))
    return {name: values[name] if name in _PER_EDGE else values[name][edge_row] for name in outputs}


class _EdgeValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        edge_row: torch.Tensor,
        target: torch.Tensor,
        head: Head,
        bounds: list[Bounds],
        outputs: tuple[str, ...],
    ) -> Any:
        dtype = _compute_dtype(hidden)
        hidden = hidden.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        values = _Values(hidden, len(target), outputs)
        cast_weight = weight.to(dtype)
        for (start, end), (low, high) in bounds:
            logits, _ = _finish(_project(hidden[start:end], cast_weight, bias, wide), head)
            values.add(logits, slice(start, end), slice(low, high), edge_row[low:high] - start, target[low:high])
        ctx.save_for_backward(hidden, weight, bias, edge_row, target, values.lse, values.of["entropy"])
        ctx.head, ctx.bounds, ctx.with_entropy = head, bounds, "entropy" in outputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(values.of[name] for name in CONSTANT))
        return tuple(values.of[name] for name in OUTPUTS)

    @staticmethod
    def backward(ctx: Any, logprob_grad: torch.Tensor | None, entropy_grad: torch.Tensor | None, *_: Any) -> Any:
        hidden, weight, bias, edge_row, target, lse, entropy = ctx.saved_tensors
        wide, dtype = lse.dtype, hidden.dtype
        if logprob_grad is None:
            logprob_grad = torch.zeros(len(target), dtype=wide, device=hidden.device)
        row_grad = torch.zeros_like(lse).index_add_(0, edge_row, logprob_grad)
        cast_weight = weight.to(dtype)
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Chunks of a low-precision model add up in float32, as one large product would inside its kernel.
        gradients = ctx.head.gradients or HeadGradients(ctx.head)
        weight_grad = gradients.sum("weight", wide) if ctx.needs_input_grad[1] else None
        bias_grad = gradients.sum("bias", wide) if bias is not None and ctx.needs_input_grad[2] else None
        for (start, end), (low, high) in ctx.bounds:
            logits, slope = _finish(_project(hidden[start:end], cast_weight, bias, wide), ctx.head, with_slope=True)
            grad = torch.exp(logits - lse[start:end, None])
            if ctx.with_entropy and entropy_grad is not None:
                surprise = lse[start:end, None] - logits - entropy[start:end, None]
                grad *= entropy_grad[start:end, None] * surprise - row_grad[start:end, None]
            else:
                grad *= -row_grad[start:end, None]
            local = edge_row[low:high] - start
            grad.index_put_((local, target[low:high]), logprob_grad[low:high], accumulate=True)
            grad = (grad * slope if slope is not None else grad).to(dtype)
            if hidden_grad is not None:
                torch.mm(grad, cast_weight, out=hidden_grad[start:end])
            if weight_grad is not None:
                if weight_grad.dtype == dtype:
                    weight_grad.addmm_(grad.t(), hidden[start:end])
                else:
                    weight_grad += grad.t() @ hidden[start:end]
            if bias_grad is not None:
                bias_grad += grad.sum(0)
        if ctx.head.gradients is not None:
            return hidden_grad, None, None, None, None, None, None, None
        cast = [
            None if grad is None else grad.to(like.dtype) for grad, like in ((weight_grad, weight), (bias_grad, bias))
        ]
        return hidden_grad, *cast, None, None, None, None, None


class _Values:
    """The outputs while chunks fill them; those that nobody asked for stay empty."""

    def __init__(self, hidden: torch.Tensor, num_edges: int, outputs: tuple[str, ...]) -> None:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        num_rows = hidden.shape[0]
        self.outputs = outputs
        self.lse = hidden.new_empty(num_rows, dtype=wide)
        self.of: dict[str, torch.Tensor] = {}
        for name in OUTPUTS:
            length = num_edges if name in _PER_EDGE else num_rows
            dtype = torch.bool if name == "is_top1" else wide
            is_filled = name in outputs or name == "log_probs"
            self.of[name] = hidden.new_empty(length if is_filled else 0, dtype=dtype)

    def add(
        self, logits: torch.Tensor, rows: slice, edges: slice, edge_row: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Fills in one chunk: logits [rows, V]; edge_row counts from the chunk's first row."""
        lse = self.lse[rows] = torch.logsumexp(logits, dim=1)
        self.of["log_probs"][edges] = logits[edge_row, target] - lse[edge_row]
        if "is_top1" in self.outputs:
            self.of["is_top1"][edges] = logits.argmax(1)[edge_row] == target
        if "mean_logits" in self.outputs:
            self.of["mean_logits"][rows] = logits.mean(1)
        if "entropy" in self.outputs or "log_sum_sq_probs" in self.outputs:
            probabilities = torch.exp(logits - lse[:, None])
            if "entropy" in self.outputs:
                self.of["entropy"][rows] = lse - (probabilities * logits).sum(1)
            if "log_sum_sq_probs" in self.outputs:
                self.of["log_sum_sq_probs"][rows] = torch.log(probabilities.square_().sum(1))


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    logits = torch.mm(hidden, weight.t())
    if bias is not None:
        logits += bias.to(logits.dtype)
    return logits.to(wide)


def _finish(
    logits: torch.Tensor, head: Head, with_slope: bool = False
) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """Scale, softcap and temperature in place, and the derivative of the result by the projection (None for 1)."""
    if head.scale != 1.0:
        logits *= head.scale
    slope: torch.Tensor | float | None = None
    factor = head.scale / head.temperature
    if head.softcap is not None:
        logits /= head.softcap
        logits.tanh_()
        if with_slope:
            slope = (1 - logits.square()) * factor
        logits *= head.softcap
    elif factor != 1.0:
        slope = factor
    if head.temperature != 1.0:
        logits /= head.temperature
    return logits, slope


def _chunk_bounds(row_E: np.ndarray, chunk: int) -> list[Bounds]:
    """Row ranges of at most `chunk` rows, each with the range of its edges. row_E: the row of each edge, ascending."""
    num_rows = int(row_E[-1]) + 1
    row_bounds = [*range(0, num_rows, chunk), num_rows]
    edge_bounds = np.searchsorted(row_E, row_bounds).tolist()
    return list(zip(pairwise(row_bounds), pairwise(edge_bounds), strict=True))
