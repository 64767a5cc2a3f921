"""`share_prefixes`: TRL's trainers on trees, by one line.

From TRL 1.15 on, every trainer scores its batch through one call: `model(input_ids, attention_mask, ..., labels=...,
fused_lm_head=True)` returns log-probs, entropies and masks in the shape of the labels. Only the forward of this one
model is patched, and only calls with `fused_lm_head=True` change: the rows become a forest, each shared token is
computed once, and the fields are restored to the rows' shape. All losses and metrics are TRL's own and run unchanged.
"""

import functools
import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.distributed import ranks
from treewise.engine.differentiable import Entries, Reader
from treewise.engine.engine import TreeEngine
from treewise.engine.scoring import router_loss_of, router_loss_reader
from treewise.engine.walk import MicroBatchOutput
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.integrations.trl.batch_forest import IGNORED, NotShareable, Rows
from treewise.integrations.trl.call import rows_of_call
from treewise.integrations.trl.fused_head import Fields, FusedHead, has_fused_head
from treewise.nn.device import to_device
from treewise.nn.model import is_peft, unwrap_model
from treewise.nn.model_checks import refuse_dropout
from treewise.nn.router_loss import RouterLoss, RouterLossRule, router_loss_rule
from treewise.planning.planner import Plan
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")


@dataclass
class Counts:
    """Batches and tokens that a model computed so far.

    num_calls: batches computed as trees. num_left: batches computed by the model's own forward. Of the former:
    num_rows; num_flat_tokens, without padding; num_tree_tokens, without repeated prefixes and tokens that no label
    depends on; num_computed_tokens, forwards of tokens with recomputed ones.
    """

    num_calls: int = 0
    num_left: int = 0
    num_rows: int = 0
    num_flat_tokens: int = 0
    num_tree_tokens: int = 0
    num_computed_tokens: int = 0

    @property
    def share_ratio(self) -> float:
        """Flat tokens / tree tokens; 1 before the first batch."""
        return self.num_flat_tokens / self.num_tree_tokens if self.num_tree_tokens else 1.0


class Sharing:
    """The patch that `share_prefixes` returns: `counts` are its statistics, `remove()` undoes it."""

    def __init__(self, model: nn.Module, engine: TreeEngine, min_ratio: float) -> None:
        self.model, self.engine, self.min_ratio = model, engine, min_ratio
        self.counts = Counts()
        self._head: FusedHead | None = None
        self._before: MethodType | None = None
        self._installed: MethodType | None = None
        self._is_active, self._is_probed = True, False
        self._class: type[nn.Module] | None = None
        self._is_relative = not _has_absolute_positions(engine)
        self._logged: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether the model has no fused head yet, because no trainer was built; until then nothing changes."""
        return self._class is not None

    def remove(self) -> None:
        """Computes every batch by the model's own forward again, and removes the wrapper if it is the outermost one."""
        self._stop_waiting()
        self._is_active = False
        if self._before is not None and self.model.forward == self._installed:
            self.model.forward = self._before

    def __repr__(self) -> str:
        counts = self.counts
        state = "waiting for a trainer, " if self.is_waiting else ""
        return (
            f"Sharing({state}{counts.num_calls:,} batches, {counts.num_rows:,} rows, {counts.num_flat_tokens:,} flat "
            f"tokens, {counts.num_tree_tokens:,} tree tokens, {counts.num_computed_tokens:,} computed, "
            f"share ratio {counts.share_ratio:.2f}; {counts.num_left:,} batches left as they were)"
        )

    # -- installation -----------------------------------------------------------------------------------------------

    def install(self, forward: MethodType) -> MethodType:
        """Wraps `forward`, which has TRL's fused head, and returns the method to call instead."""
        self._head = FusedHead(self.model, forward)
        self._before = forward

        # `generate` and the Trainer read the signature of a model's forward.
        @functools.wraps(forward.__func__)
        def tree_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if model is not self.model:  # a deep copy, with parameters of its own
                return forward.__func__(model, *args, **kwargs)
            if not self._is_active or not kwargs.get("fused_lm_head"):
                return forward(*args, **kwargs)
            return self._serve(*args, **kwargs)

        self._installed = MethodType(tree_forward, self.model)
        return self._installed

    def wait(self) -> None:
        """Calls `install` when a trainer sets the model's forward to one with a fused head.

        Until then the model's class is a subclass of the same name whose `__setattr__` handles this one attribute.
        """
        original = type(self.model)

        def watch(model: nn.Module, name: str, value: Any) -> None:
            if name == "forward" and model is self.model and has_fused_head(value):
                self._stop_waiting()
                value = self.install(value)
            original.__setattr__(model, name, value)

        body = {"__setattr__": watch, "__module__": original.__module__, "__qualname__": original.__qualname__}
        self._class = original
        self.model.__class__ = type(original.__name__, (original,), body)

    def _stop_waiting(self) -> None:
        if self._class is not None:
            self.model.__class__ = self._class
            self._class = None

    # -- serving ----------------------------------------------------------------------------------------------------

    def _serve(self, *args: Any, **kwargs: Any) -> Any:
        assert self._before is not None
        try:
            rule = self._router_loss_rule(kwargs)
            rows, labels = self._rows(args, kwargs, keeps_all=rule is not None)
        except NotShareable as reason:
            self._log_once(logging.WARNING, f"a batch is left to the model's own forward: {reason}.")
            rows = None
        if rows is None or not self._is_worth_it(rows, labels):
            self.counts.num_left += 1
            return self._before(*args, **kwargs)
        fields, aux_loss, plan = self._fields(rows, rule)
        self._count(rows, labels, plan)
        output = _output(fields, rows, labels, kwargs.get("num_items_in_batch"))
        if aux_loss is not None:
            output.aux_loss = aux_loss
            output.loss = output.loss + getattr(self._text_config, "router_aux_loss_coef", 0.0) * aux_loss
        return output

    def _router_loss_rule(self, kwargs: dict[str, Any]) -> RouterLossRule | None:
        """The load-balancing loss, if this call asks for it; without its factor, which TRL multiplies by itself."""
        is_asked = kwargs.get("output_router_logits")
        if not (getattr(self._text_config, "output_router_logits", False) if is_asked is None else is_asked):
            return None
        try:
            rule = router_loss_rule(self.model, wants_aux=True)
        except UnsupportedModelError as error:
            raise NotShareable(str(error).rstrip(".")) from None
        assert rule is not None
        return replace(rule, aux_coefficient=1.0)

    @property
    def _text_config(self) -> Any:
        return self.model.config.get_text_config()  # type: ignore[operator, union-attr]

    def _rows(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, keeps_all: bool
    ) -> tuple[Rows | None, torch.Tensor]:
        try:
            refuse_dropout(self.model)
        except UnsupportedModelError as error:
            raise NotShareable(f"every row would have a dropout mask of its own. {str(error).rstrip('.')}") from None
        return rows_of_call(args, kwargs, is_relative=self._is_relative, keeps_all=keeps_all)

    def _is_worth_it(self, rows: Rows, labels: torch.Tensor) -> bool:
        """Whether the tree is smaller than the rows by enough, or the rows would not fit the budget."""
        num_padded = labels.shape[0] * (labels.shape[1] + 1)
        budget = self.engine.max_tokens
        if num_padded >= self.min_ratio * rows.forest.num_tokens or (budget is not None and num_padded > budget):
            return True
        self._log_once(
            logging.INFO,
            f"batches with little to share (fewer than {self.min_ratio:g} tokens of the rows, padding included, for "
            "each tree token) are left to the model's own forward.",
        )
        return False

    def _fields(self, rows: Rows, rule: RouterLossRule | None) -> tuple[Fields, torch.Tensor | None, Plan]:
        """[E] values of the edges by name, the router loss if there is a rule, and the plan that gave them."""
        assert self._head is not None
        head, autocast = self._head, self._head.autocast

        def compute() -> tuple[Fields, torch.Tensor | None, Plan]:
            with nullcontext() if autocast is None else autocast.again():
                self._probe_once(rows.forest)
                plan = self.engine.plan(rows.forest)
                _refuse_pieces_on_several_ranks(plan)
                return *self._values(rows, plan, head, rule), plan

        # The forward adds to no gradient, so it may run again with a smaller budget.
        return self.engine.budget.run(compute, rows.forest.num_tokens)

    def _probe_once(self, forest: Forest) -> None:
        """Probes the model, which calls its own forward, without the wrappers around the present call.

        accelerate enters one autocast object around every call; a call inside a call would leave autocast enabled.
        """
        if self._is_probed:
            return
        outermost, self.model.forward = self.model.forward, self._before  # type: ignore[assignment]
        try:
            self.engine.check(forest)
        finally:
            self.model.forward = outermost
        self._is_probed = True

    def _values(
        self, rows: Rows, plan: Plan, head: FusedHead, rule: RouterLossRule | None
    ) -> tuple[Fields, torch.Tensor | None]:
        reader = _field_reader(rows, head)
        if rule is None:
            return self.engine.values(plan, [reader])[0], None
        router_loss = RouterLoss(rule, plan.forest.multiplicity)
        fields, parts = self.engine.values(plan, [reader, router_loss_reader(router_loss, plan)])
        return fields, router_loss_of(router_loss, parts)

    def _count(self, rows: Rows, labels: torch.Tensor, plan: Plan) -> None:
        counts = self.counts
        counts.num_calls += 1
        counts.num_rows += labels.shape[0]
        counts.num_flat_tokens += rows.num_real
        counts.num_tree_tokens += rows.forest.num_tokens
        counts.num_computed_tokens += plan.num_computed_tokens

    def _log_once(self, level: int, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.log(level, message)


def share_prefixes(
    model: nn.Module,
    max_tokens: int | str | None = None,
    *,
    attention: str = "auto",
    min_ratio: float = 1.1,
) -> Sharing:
    """Makes TRL's trainers compute the shared prefixes of each batch once, with the same losses and gradients.

    Call it with a trainer's model, or with its reference model, before or after the trainer is built; once for each
    trainer. Of a PEFT model, passes with and without the adapter are shared.

    Parameters:
        model: a transformers causal language model; PEFT, DDP, `torch.compile` and accelerate may be around it.
        max_tokens: the most tokens with live activations, as in `TreeEngine`: None for one micro-batch, `auto` to
            measure.
        attention: as in `TreeEngine`.
        min_ratio: batches with fewer tokens than this (padding included) for each tree token are left to the model's
            own forward, unless they would exceed `max_tokens`.

    Raises:
        UnsupportedModelError: the model cannot follow a tree (docs/models.md), learns a prompt, or has a head that is
            not TRL's fused one.
        ConfigError: TRL is not installed or older than 1.15, an invalid setting, or not a model.
    """
    _require_trl()
    if not min_ratio >= 0:
        raise ConfigError(f"min_ratio={min_ratio} must not be negative.")
    argument: Any = model
    if not isinstance(argument, nn.Module):
        is_trainer = hasattr(argument, "train_dataset")
        hint = " Give it the trainer's model: share_prefixes(trainer.model)." if is_trainer else ""
        raise ConfigError(f"share_prefixes takes a model, found a {type(argument).__name__}.{hint}")
    outer = unwrap_model(model)
    # Raises for adapters around the base model that cannot follow a tree. TRL asks for a router loss call by call.
    TreeEngine(outer, max_tokens, attention, check=False, router_aux_loss=False)
    base: nn.Module = outer.get_base_model() if is_peft(outer) else outer
    sharing = Sharing(base, TreeEngine(base, max_tokens, attention, router_aux_loss=False), min_ratio)
    if has_fused_head(base.forward):
        base.forward = sharing.install(base.forward)  # type: ignore[arg-type]
    else:
        sharing.wait()
        logger.info("share_prefixes waits until a trainer is built with this model.")
    return sharing


def _field_reader(rows: Rows, head: FusedHead) -> Reader:
    """Reads the [E] fields of the edges, as TRL's head computes them."""

    def read(output: MicroBatchOutput) -> Entries | None:
        edges, source = _edges_from(rows, output.positions)
        if len(edges) == 0:
            return None
        device = output.hidden.device
        return edges, head(output.hidden[to_device(source, device)], to_device(rows.label[edges], device))

    return Reader(read, head.names, len(rows.source), without_gradient=head.without_gradient)


def _edges_from(rows: Rows, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The edges that leave the tokens of a micro-batch, and the row of the token that each leaves.

    positions: [T] int64 tree positions, ascending. Returns two int64 arrays of one length.
    """
    row = np.searchsorted(positions, rows.source)
    is_inside = row < len(positions)
    is_inside[is_inside] = positions[row[is_inside]] == rows.source[is_inside]
    edges = np.flatnonzero(is_inside)
    return edges, row[edges]


def _output(fields: Fields, rows: Rows, labels: torch.Tensor, num_items_in_batch: Any) -> Any:
    """TRL's output, every field in the shape of the labels, zero where there is no label."""
    from trl.trainer.utils import FusedCausalLMOutput

    mask = labels != IGNORED
    device = fields["log_probs"].device
    cell = to_device(rows.cell, device)
    edge = to_device(rows.edge, device)
    restored = {
        name: value.new_zeros(labels.numel()).index_copy(0, cell, value[edge]).view(labels.shape)
        for name, value in fields.items()
    }
    # FusedCausalLMOutput documents the loss: the sum over scored labels by num_items_in_batch, or by their count.
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return FusedCausalLMOutput(loss=-restored["log_probs"].sum() / count, label_mask=mask.to(device), **restored)


def _refuse_pieces_on_several_ranks(plan: Plan) -> None:
    """Raises for several micro-batches on several ranks: each runs a backward and, sharded, gathers of its own, which
    no other rank would join."""
    if not plan.is_whole and ranks.count() > 1:
        raise ConfigError(
            f"a batch of {plan.forest.num_tokens:,} tree tokens exceeds max_tokens={plan.max_tokens:,}, and on several "
            "ranks share_prefixes computes a batch whole. Leave max_tokens=None and lower per_device_train_batch_size."
        )


def _has_absolute_positions(engine: TreeEngine) -> bool:
    """Whether the decoder has a table of position embeddings, so that left padding changes its rows."""
    return any(
        isinstance(module, nn.Embedding) and ("pos" in name or "wpe" in name)
        for name, module in engine.lm.decoder.named_modules()
    )


def _require_trl() -> None:
    try:
        from trl.trainer import utils
    except ImportError as error:
        raise ConfigError("share_prefixes is for TRL's trainers; pip install 'treewise[trl]'.") from error
    if not hasattr(utils, "add_fused_lm_head"):
        raise ConfigError("share_prefixes needs TRL 1.15 or later, whose trainers score through one fused head.")
