"""One batch of a trainer with trees and without: whether losses and gradients are equal."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from treewise.distributed import ranks
from treewise.distributed.divided_tensors import local_part
from treewise.distributed.others_shards import OthersShards
from treewise.errors import ConfigError, VerificationError
from treewise.integrations.batches.tree_batches import Counts
from treewise.nn.gradients import gradients_restored
from treewise.nn.platform.tensors import autocast_dtype
from treewise.nn.whole_gradients import (
    LOW_PRECISION,
    MAX_TIMES_FLAT,
    TOLERANCE,
    Gradients,
    gradient_error,
    take_gradients,
)

LossOf = Callable[[Any], torch.Tensor]


class _Shared(Protocol):
    """A model that shares; `counts` tell whether a batch did."""

    model: nn.Module
    counts: Counts
    shards: OthersShards | None

    def paused(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What a batch gave with trees and without.

    loss_tree, loss_own: with trees, and by the model's own forward. loss_error, gradient_error: relative to the
    reference; limit: the largest allowed. own_gradient_error: of the model's own forward in low precision, relative to
    float32; None where that is the reference. left: why the batch was left to the model's own forward; None: it was
    not.
    """

    loss_tree: float
    loss_own: float
    loss_error: float
    gradient_error: float
    own_gradient_error: float | None
    limit: float
    share_ratio: float
    left: str | None

    @property
    def passed(self) -> bool:
        return self.loss_error <= self.limit and self.gradient_error <= self.limit

    def __str__(self) -> str:
        own = "" if self.own_gradient_error is None else f", {self.own_gradient_error:.1e} without trees"
        shared = f"share ratio {self.share_ratio:.2f}" if self.left is None else f"not shared: {self.left}"
        return (
            f"{'equal' if self.passed else 'DIFFERENT'}: loss {self.loss_tree:.8g}, {self.loss_own:.8g} without trees; "
            f"gradient off by {self.gradient_error:.1e}{own} (limit {self.limit:.1e}); {shared}"
        )

    def raise_if_failed(self) -> None:
        """Raises `VerificationError` with the errors if one is beyond its limit."""
        if not self.passed:
            raise VerificationError(f"a batch with trees and without: {self}.")


def verify_batch(sharing: _Shared, batch: Mapping[str, Any], *, loss_of: LossOf | None = None) -> BatchReport:
    """Losses and gradients of one batch with trees, against those of the model's own forward.

    `.grad`s and random generators are as before. In bfloat16 and float16 the reference is a copy of the model in
    float32, and trees may be 1.5 times as far from it as the own forward is.

    Parameters:
        batch: what the model is called with.
        loss_of: maps the model's output to a scalar; None: its loss, or where the batch has no labels a fixed sum of
            its logits.

    Raises:
        ConfigError: an output without a loss that requires a gradient; a sharded model in low precision, of which there
            is no copy in float32.
    """
    model, own_loss = sharing.model, loss_of or partial(_default_loss, batch.get("attention_mask"))
    dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
    dtype = autocast_dtype(next(model.parameters()).device.type) or dtype
    error_of = gradient_error
    if (shards := sharing.shards) is not None:
        shards.divide()
        if low := {dtype, *shards.dtypes} & {*LOW_PRECISION}:
            raise ConfigError(
                f"verify compares a model in {', '.join(map(str, low))} with a copy in float32, and a sharded one has "
                "none; call it before the model is sharded, or shard it in float32."
            )
        model, error_of = shards.root or model, partial(gradient_error, add_up=partial(ranks.sum_over, shards.device))
    with sharing.paused():
        loss_own, own = _gradients(model, batch, own_loss)
    before = dict(sharing.counts.left)
    flat, tree = sharing.counts.num_flat_tokens, sharing.counts.num_tree_tokens
    loss_tree, found = _gradients(model, batch, own_loss)
    left = next((why for why, count in sharing.counts.left.items() if count > before.get(why, 0)), None)
    new_flat, new_tree = sharing.counts.num_flat_tokens - flat, sharing.counts.num_tree_tokens - tree
    loss, reference, own_error, limit = loss_own, own, None, TOLERANCE.get(dtype, 0.0)
    if dtype in LOW_PRECISION:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            loss, reference = _gradients(copy.deepcopy(model).float(), _wide(batch), own_loss)
        own_error = gradient_error(own, reference)
        limit = MAX_TIMES_FLAT * max(own_error, abs(loss_own - loss) / max(abs(loss), 1e-12), torch.finfo(dtype).eps)
    return BatchReport(
        loss_tree,
        loss_own,
        abs(loss_tree - loss) / max(abs(loss), 1e-12),
        error_of(found, reference),
        own_error,
        limit,
        new_flat / new_tree if new_tree else 1.0,
        left,
    )


def _gradients(model: nn.Module, batch: Mapping[str, Any], loss_of: LossOf) -> tuple[float, Gradients]:
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), gradients_restored(model):
        torch.manual_seed(0)
        with torch.enable_grad() if not torch.is_grad_enabled() else nullcontext():
            loss = loss_of(model(**batch))
            if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
                raise ConfigError("the batch gives no loss with a gradient; pass labels, or loss_of=.")
            loss.backward()
        return float(loss.detach()), {name: local_part(grad) for name, grad in take_gradients(model).items()}


def _default_loss(mask: object, output: Any) -> torch.Tensor:
    """mask: [B, L] or None; of padding the logits have no meaning."""
    if getattr(output, "loss", None) is not None:
        loss: torch.Tensor = output.loss
        return loss
    logits: torch.Tensor = output.logits.float()
    weights = torch.linspace(-1, 1, logits.shape[-1], device=logits.device)
    sums = (logits.log_softmax(-1) * weights).sum(-1)
    return (sums * mask if isinstance(mask, torch.Tensor) and mask.shape == sums.shape else sums).mean()


def _wide(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }
