"""Log-probs of edges from hidden rows, in chunks, never holding the logits of more than one chunk.

A fork has one hidden row and several targets: its row is projected once. Rows without a needed target are not
projected at all. Where the loss of an edge depends on that edge's values alone, nothing is projected twice: the
gradients of a chunk are taken while its logits are there (`edge_loss`), three products with the weight. Values whose
gradients come later (`edge_values`) need a fourth: their backward projects again (`nn.edge_values`). A head that is
more than one weight (most adapters of PEFT) runs its own forward on each chunk instead, again in the backward
(`nn.module_head`).

Letters: R projected rows, E edges, M model width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from treewise.base import features
from treewise.base.shapes import Context, Float, Int
from treewise.errors import ConfigError
from treewise.nn.platform.tensors import autocast_dtype, to_device

if TYPE_CHECKING:
    from treewise.nn.tensor_parallel import VocabularyShard

OUTPUTS = ("log_probs", "entropy")  # of an edge; the names are TRL's, see `edge_values`
# Logits alive at a time: 64 MiB of float32 on a CPU, where caches are small; 512 MiB on a GPU.
MAX_LOGITS = {"cpu": 2**24, "cuda": 2**27}
_NUM_SLICES = 8  # of a chunk, for sums over its rows; what they compute on the way is no larger than one of them
# Values of the weight whose gradient is added up at a time where it is wider than the product: 24 MiB with the copy on
# a CPU; 256 MiB on a GPU, where a vocabulary of 152,000 by 4,096 takes 5 products a chunk in place of 149.
MAX_PRODUCT = {"cpu": 2**22, "cuda": 2**27}
_SIZED_AS: dict[str, str] = {}  # see `sized_as`
# Up to so many rows are padded for their product with the weight in the backward: where rows, or those that a thread
# gets, are no multiple of four, torch's CPU kernel (MKL) adds the terms of the vocabulary one by one for the rest. Of
# 49,152 in float32 that is 5.8e-6 off where four rows are 5e-7; with 96 threads also at 199 rows.
MAX_PADDED, _MULTIPLE = {"cpu": 256, "cuda": 0}, 4

Bounds = tuple[tuple[int, int], tuple[int, int]]  # of a chunk: its rows, and its edges
LossOfEdges = Callable[[dict[str, Tensor], slice], Tensor]  # a scalar from the values of some edges, and which they are


@contextmanager
def sized_as(device_type: str, stand_in: str) -> Iterator[None]:
    """Inside, tensors on `stand_in` (without data: `meta`) are computed in pieces of the sizes of `device_type`."""
    before = dict(_SIZED_AS)
    _SIZED_AS[stand_in] = device_type
    try:
        yield
    finally:
        _SIZED_AS.clear()
        _SIZED_AS.update(before)


def _most(of_kinds: Mapping[str, int], tensor: Tensor) -> int:
    kind = tensor.device.type
    return of_kinds.get(_SIZED_AS.get(kind, kind), of_kinds["cpu"])


@dataclass(frozen=True, slots=True)
class LowRank:
    """`scaling * high @ low`, a trained part of a head's weight whose rest is not: LoRA. low: [r, M]. high: [V, r]."""

    low: torch.Tensor
    high: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True)
class Head:
    """How a model turns hidden rows into logits: `softcap * tanh(scale * (h W^T + b) / softcap) / temperature`.

    weight: [V, M]. bias: [V]. gradients: accumulator for the gradients of weight and bias; None: autograd accumulates.
    shard: weight and bias are this rank's rows of a vocabulary that is spread over ranks, which all call each function.
    parts: all of the weight that is trained, where these are factors. A head that collects gradients adds up theirs, in
    place of one as large as the vocabulary, which takes two products of that size, not three.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    gradients: "HeadGradients | None" = None
    shard: "VocabularyShard | None" = None
    parts: tuple[LowRank, ...] = ()

    @property
    def num_tokens(self) -> int:
        """V, the size of the vocabulary over all ranks."""
        return self.weight.shape[0] if self.shard is None else self.shard.num_tokens

    @property
    def num_local_tokens(self) -> int:
        """Logits of a row on this rank."""
        return self.weight.shape[0] if self.shard is None else self.shard.num_local_tokens

    def collecting(self) -> "Head":
        """A detached copy that accumulates its gradients; `gradients.join()` back-propagates them to the parameters."""
        weight = self.weight.detach().requires_grad_(self.weight.requires_grad)
        bias = None if self.bias is None else self.bias.detach().requires_grad_(self.bias.requires_grad)
        return replace(self, weight=weight, bias=bias, gradients=HeadGradients(self))

    def edge_values(
        self, hidden: torch.Tensor, edge_row: torch.Tensor, target: torch.Tensor, bounds: list[Bounds], *, entropy: bool
    ) -> dict[str, torch.Tensor]:
        """See `AnyHead`."""
        apply = features.edge_values.EdgeValues.apply
        log_probs_E, entropy_R = apply(hidden, self.weight, self.bias, edge_row, target, self, (bounds, entropy))
        return {"log_probs": log_probs_E} | ({"entropy": entropy_R[edge_row]} if entropy else {})

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., V] in float32 or wider, from hidden rows [.., M]."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        rows = hidden.to(self.weight.dtype).reshape(-1, hidden.shape[-1])
        logits = project(rows, self.weight, self.bias, wide, self)[0].unflatten(0, hidden.shape[:-1])
        return logits if self.shard is None else self.shard.gathered(logits)


class AnyHead(Protocol):
    """What maps hidden rows to logits: a `Head`, or one whose forward is more than a product (`ModuleHead`)."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_local_tokens(self) -> int: ...
    @property
    def gradients(self) -> "HeadGradients | None": ...
    def collecting(self) -> "AnyHead": ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def edge_values(
        self, hidden: torch.Tensor, edge_row: torch.Tensor, target: torch.Tensor, bounds: list[Bounds], *, entropy: bool
    ) -> dict[str, torch.Tensor]:
        """Of the rows that are projected ([R, M]), in chunks; edge_row: [E] int64, the row of each edge."""
        ...


class HeadGradients:
    """Gradients of a head's weight and bias over many micro-batches, in float32 or wider.

    They are as large as the vocabulary however small a micro-batch is: a new tensor for each micro-batch, added to
    `.grad`, would cost more than the micro-batch itself.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a tensor of the head, its sum

    @property
    def parts(self) -> tuple[LowRank, ...]:
        """Those of the head, which takes no gradient of its weight then."""
        return self._head.parts

    def weight(self, wide: torch.dtype) -> torch.Tensor:
        """[V, M], the sum so far, in dtype `wide`; the caller adds to it in place."""
        return self._sum(self._head.weight, wide)

    def bias(self, wide: torch.dtype) -> torch.Tensor:
        """[V], the sum so far, in dtype `wide`; the caller adds to it in place."""
        assert self._head.bias is not None
        return self._sum(self._head.bias, wide)

    def add_to_parts(self, grad: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds the gradients of `parts`, from rows ([R, M]) and the gradient of their projections ([R, V])."""
        kind = rows.device.type
        with torch.autocast(kind, enabled=False) if autocast_dtype(kind) else nullcontext():
            rows = rows.to(grad.dtype)
            for part in self.parts:
                low, high = part.low.detach().to(grad.dtype), part.high.detach().to(grad.dtype)
                if part.high.requires_grad:
                    self._sum(part.high, grad.dtype).addmm_(grad.t(), rows @ low.t(), alpha=part.scaling)
                if part.low.requires_grad:
                    back = (padded(grad) @ high)[: len(grad)]
                    self._sum(part.low, grad.dtype).addmm_(back.t(), rows, alpha=part.scaling)

    def join(self) -> None:
        """Adds everything to the gradients of the parameters behind the head."""
        sums = [*self._sums.values()]
        self._sums.clear()
        if sums:
            torch.autograd.backward([each for each, _ in sums], [total.to(each.dtype) for each, total in sums])

    def _sum(self, tensor: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        if id(tensor) not in self._sums:
            self._sums[id(tensor)] = tensor, torch.zeros_like(tensor, dtype=wide, requires_grad=False)
        return self._sums[id(tensor)][1]


def edge_values(
    hidden: Float[Tensor, "T M"],
    head: AnyHead,
    source: Int[np.ndarray, " E"] | Int[Tensor, " E"],
    target: Int[Tensor, " E"],
    outputs: tuple[str, ...] = ("log_probs",),
) -> dict[str, Float[Tensor, " E"]]:
    """Log-probs of `target[e]`, predicted from hidden row `source[e]`; several targets may share a row.

    hidden: [T, M]. source: [E] int64, ascending; best an array, since the host has to wait for the values of a tensor
    on a GPU. target: [E] int64 token ids. outputs: names out of `OUTPUTS`:

    * `log_probs`: natural log-prob of the target; always computed.
    * `entropy`: of the predicting distribution, in nats.

    Returns differentiable [E] tensors by name, float32 (float64 for float64 models).

    Raises:
        ConfigError: an unknown output.
    """
    if not set(outputs) <= set(OUTPUTS):
        raise ConfigError(f"unknown outputs {sorted(set(outputs) - set(OUTPUTS))}; choose out of {', '.join(OUTPUTS)}.")
    if len(source) == 0:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        empty = hidden.sum() * torch.zeros(0, dtype=wide, device=hidden.device)
        return dict.fromkeys(outputs, empty)
    projected, edge_row, bounds = _projected(hidden, head, source)
    return head.edge_values(projected, edge_row, target, bounds, entropy="entropy" in outputs)


def edge_loss(
    hidden: Float[Tensor, "T M"],
    head: AnyHead,
    source: Int[np.ndarray, " E"] | Int[Tensor, " E"],
    target: Int[Tensor, " E"],
    loss_of: LossOfEdges,
    outputs: tuple[str, ...] = ("log_probs",),
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, " E"]]]:
    """The sum of `loss_of` over all edges, a scalar, and the values of these, detached; arguments as in `edge_values`.

    loss_of: the loss of some edges from their values, which may not depend on those of edges of other rows. It is
    called chunk by chunk, and its gradients are taken there. They are final: the backward that reaches the result has
    to start from it, with a gradient of one, and may run once.
    """
    if torch.is_grad_enabled() and isinstance(head, Head) and head.shard is None and len(source):
        projected, edge_row, bounds = _projected(hidden, head, source)
        how = loss_of, bounds, "entropy" in outputs
        loss, *values = _EdgeLoss.apply(projected, head.weight, head.bias, edge_row, target, head, how)
        return loss, dict(zip(OUTPUTS, values, strict=False))
    found = edge_values(hidden, head, source, target, outputs)
    return loss_of(found, slice(0, len(target))), {name: value.detach() for name, value in found.items()}


def _projected(
    hidden: torch.Tensor, head: AnyHead, source: np.ndarray | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[Bounds]]:
    """[R, M] hidden rows of all edges, the row of each edge ([E] int64), and chunks of rows with their edges."""
    source_E = source.cpu().numpy() if isinstance(source, torch.Tensor) else source
    is_first_E = np.diff(source_E, prepend=-1) != 0
    row_E = np.cumsum(is_first_E) - 1
    max_logits = _most(MAX_LOGITS, hidden)
    # Chunks of rows, each with its range of edges. The last one is full, since its logits may be kept; what remains is
    # the first.
    num_rows, chunk = int(row_E[-1]) + 1, max(1, max_logits // head.num_local_tokens)
    row_bounds = [0, *range((num_rows - 1) % chunk + 1, num_rows + 1, chunk)]
    edge_bounds = np.searchsorted(row_E, row_bounds).tolist()
    bounds: list[Bounds] = list(zip(pairwise(row_bounds), pairwise(edge_bounds), strict=True))
    edge_row = to_device(row_E, hidden.device)
    return hidden.index_select(0, to_device(source_E[is_first_E], hidden.device)), edge_row, bounds


class _EdgeLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        edge_row: torch.Tensor,
        target: torch.Tensor,
        head: Head,
        how: tuple[LossOfEdges, list[Bounds], bool],  # and whether entropies are wanted
    ) -> tuple[torch.Tensor, ...]:
        loss_of, bounds, with_entropy = how
        dtype = autocast_dtype(hidden.device.type) or weight.dtype
        hidden = hidden.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        cast_weight = weight.to(dtype)
        gradients = ChunkGradients(head, hidden, ctx.needs_input_grad, wide)
        values_E = [hidden.new_empty(len(target), dtype=wide) for _ in range(1 + with_entropy)]
        losses = []
        for (start, end), (low, high) in bounds:
            logits, slope = project(hidden[start:end], cast_weight, bias, wide, head, with_slope=True)
            row, column = edge_row[low:high] - start, target[low:high]
            lse = over_rows(partial(torch.logsumexp, dim=1), logits)
            entropy = lse - over_rows(means, logits, lse[:, None]) if with_entropy else None
            values_E[0][low:high] = logits[row, column] - lse[row]
            if entropy is not None:
                values_E[1][low:high] = entropy[row]
            loss, grads = _gradients_of(loss_of, [value[low:high] for value in values_E], slice(low, high))
            losses.append(loss)
            row_grad = torch.zeros_like(lse).index_add_(0, row, grads[0])
            entropies = None
            if entropy is not None:
                entropies = entropy, torch.zeros_like(lse).index_add_(0, row, grads[1])
            grad = gradient_of_logits(logits, slope, lse, row_grad, (row, column, grads[0]), entropies)
            del logits, slope
            gradients.add(grad, cast_weight, start, end)
            del grad
        ctx.save_for_backward(gradients.hidden)
        ctx.of_head = gradients.of_head()
        ctx.mark_non_differentiable(*values_E)
        ctx.set_materialize_grads(False)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(), *values_E

    @staticmethod
    def backward(ctx: Context, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (hidden_grad,) = ctx.saved_tensors
        of_head, ctx.of_head = ctx.of_head, None
        assert of_head is not None, "one backward alone"
        return hidden_grad, *of_head, None, None, None, None


def _gradients_of(loss_of: LossOfEdges, values: list[torch.Tensor], edges: slice) -> tuple[torch.Tensor, list[Tensor]]:
    """The loss of some edges, and its gradients with respect to their values, each [E]."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in values]
        loss = loss_of(dict(zip(OUTPUTS, leaves, strict=False)), edges)
        if not loss.requires_grad:
            return loss, [torch.zeros_like(leaf) for leaf in leaves]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), list(grads)


def means(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """[R] mean logits under the softmax, from [R, V] and [R, 1]."""
    return torch.sub(logits, lse).exp_().mul_(logits).sum(1)


def gradient_of_logits(
    logits: torch.Tensor,
    slope: torch.Tensor | float | None,
    lse: torch.Tensor,
    row_grad: torch.Tensor,
    edges: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    entropies: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """[R, V], the gradient of a chunk's projections, in place of its logits where these are not needed.

    lse: [R]. row_grad: [R], the sums of the gradients of each row's log-probs. edges: row, token and gradient of each.
    entropies: [R] each, with their gradients.
    """
    grad = torch.sub(logits, lse[:, None], out=logits if entropies is None else None).exp_()
    if entropies is not None:
        entropy, entropy_grad = entropies
        surprise = lse[:, None] - logits - entropy[:, None]
        grad *= entropy_grad[:, None] * surprise - row_grad[:, None]
    else:
        grad *= -row_grad[:, None]
    row, column, logprob_grad = edges
    grad.index_put_((row, column), logprob_grad, accumulate=True)
    if slope is not None:
        grad *= slope
    return grad


class ChunkGradients:
    """Gradients of a head's rows, weight and bias, which its chunks add up; each is None where it is not needed.

    hidden: the rows, as they are projected. needs: whether rows, weight and bias have gradients.
    """

    def __init__(self, head: Head, hidden: torch.Tensor, needs: Sequence[bool], wide: torch.dtype) -> None:
        # Chunks of a low-precision model add up in float32, as one large product would inside its kernel.
        sums = head.gradients or HeadGradients(head)
        self._head, self._rows = head, hidden
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        is_in_parts = head.gradients is not None and bool(sums.parts)
        self._in_parts = sums if needs[1] and is_in_parts else None
        self._weight = sums.weight(wide) if needs[1] and not is_in_parts else None
        self._bias = sums.bias(wide) if needs[2] else None

    def add(self, grad: torch.Tensor, cast_weight: torch.Tensor, start: int, end: int) -> None:
        """Of the rows `start:end`, from the gradient of their projections ([R, V])."""
        if self._in_parts is not None:
            self._in_parts.add_to_parts(grad, self._rows[start:end])
        grad = grad.to(self._rows.dtype)
        if self.hidden is not None:
            self.hidden[start:end] = (padded(grad) @ cast_weight)[: len(grad)]
        if self._weight is not None:
            _add_product(self._weight, grad, self._rows[start:end])
        if self._bias is not None:
            self._bias += grad.sum(0)

    def of_head(self) -> list[torch.Tensor | None]:
        """Of weight and bias, in their dtypes; None where the head collects them."""
        if self._head.gradients is not None:
            return [None, None]
        own = (self._weight, self._head.weight), (self._bias, self._head.bias)
        return [None if total is None or like is None else total.to(like.dtype) for total, like in own]


def padded(rows: torch.Tensor) -> torch.Tensor:
    """With rows of zeros, where their number would make a product inaccurate."""
    missing = -len(rows) % _MULTIPLE
    if not missing or len(rows) > _most(MAX_PADDED, rows):
        return rows
    return torch.nn.functional.pad(rows, (0, 0, 0, missing))


def over_rows(reduce: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """[R] values of the rows of [R, V] and [R, 1] tensors, a slice of the rows at a time."""
    size = -(-len(tensors[0]) // _NUM_SLICES)
    return torch.cat([reduce(*parts) for parts in zip(*(tensor.split(size) for tensor in tensors), strict=True)])


def _add_product(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """Adds the transpose of `grad` ([R, V]) times `hidden` ([R, M]) to `total` ([V, M]), which may be wider."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), hidden)
        return
    most = _most(MAX_PRODUCT, total)
    for start in range(0, len(total), size := max(1, most // total.shape[1])):
        total[start : start + size] += grad[:, start : start + size].t() @ hidden


def project(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    wide: torch.dtype,
    head: Head,
    with_slope: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """[R, V] logits of hidden rows [R, M] in dtype `wide`, and their derivative by the projection.

    The derivative is None for 1 everywhere; with a softcap it is computed only on demand (`with_slope`).
    """
    logits = torch.mm(hidden, weight.t())
    if bias is not None:
        logits += bias.to(logits.dtype)
    logits = logits.to(wide)
    if head.scale != 1.0:
        logits *= head.scale
    factor = head.scale / head.temperature
    slope: torch.Tensor | float | None = None if head.softcap is not None or factor == 1.0 else factor
    if head.softcap is not None:
        logits /= head.softcap
        logits.tanh_()
        if with_slope:
            slope = logits.square().neg_().add_(1).mul_(factor)
        logits *= head.softcap
    if head.temperature != 1.0:
        logits /= head.temperature
    return logits, slope
