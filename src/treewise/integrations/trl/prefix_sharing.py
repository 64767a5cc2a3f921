"""`share_prefixes`: TRL's trainers on trees, by one line.

From TRL 1.15 on, every trainer scores its batch through one seam: `model(input_ids, attention_mask, ..., labels=...,
fused_lm_head=True)` returns log-probs, entropies and masks in the shape of the labels. What is patched is this forward
of one model, and only calls with `fused_lm_head=True` change: the rows become a forest, each shared token is computed
once, and the fields are restored to the rows' shape. All losses and metrics are TRL's own and run unchanged.
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

from treewise.engine.differentiable import Part, Read, gather
from treewise.engine.engine import TreeEngine
from treewise.engine.routed import gather_routed
from treewise.engine.walk import Walk
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.integrations.trl.batch_forest import IGNORED, NotShareable, Rows
from treewise.integrations.trl.call import num_ranks, rows_of_call
from treewise.integrations.trl.fused_head import Fields, FusedHead, has_fused_head
from treewise.nn.device import is_out_of_memory, to_device
from treewise.nn.model import refuse_dropout
from treewise.nn.router_loss import Routing, RoutingRule, rule_of
from treewise.planning.planner import Plan
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")


@dataclass
class Counts:
    """What a model computed through the seam so far.

    num_calls: batches computed as trees. num_left: batches that the model's own forward took. num_rows: rows of the
    former, num_flat_tokens their tokens without padding, num_tree_tokens the tokens left after sharing and after
    leaving out what no label depends on, num_computed_tokens the forwards of tokens, recomputed ones included.
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
    """What `share_prefixes` returns: `counts` say what was shared, `remove()` undoes it."""

    def __init__(self, model: nn.Module, engine: TreeEngine, min_ratio: float) -> None:
        self.model, self.engine, self.min_ratio = model, engine, min_ratio
        self.counts = Counts()
        self._head: FusedHead | None = None
        self._before: MethodType | None = None
        self._installed: MethodType | None = None
        self._is_active, self._is_checked = True, False
        self._class: type[nn.Module] | None = None
        self._is_relative = not _has_absolute_positions(engine)
        self._said: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether no trainer has given the model a fused head yet; until then nothing changes."""
        return self._class is not None

    def remove(self) -> None:
        """Lets every batch go the model's own way again, and takes the wrapper off where nothing was put around it."""
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
        """Puts this in front of `forward`, which has TRL's fused head, and returns what to call instead."""
        self._head = FusedHead(self.model, forward)
        self._before = forward

        # `generate` and the Trainer read the signature of a model's forward.
        @functools.wraps(forward.__func__)
        def tree_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if model is not self.model:  # a deep copy, whose parameters are its own
                return forward.__func__(model, *args, **kwargs)
            if not self._is_active or not kwargs.get("fused_lm_head"):
                return forward(*args, **kwargs)
            return self._serve(*args, **kwargs)

        self._installed = MethodType(tree_forward, self.model)
        return self._installed

    def wait(self) -> None:
        """Lets `install` happen when a trainer sets the model's forward to one with a fused head.

        Until then the model's class is a subclass of the same name that watches this one attribute.
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
            rule = self._routing_rule(kwargs)
            rows, labels = self._rows(args, kwargs, keeps_all=rule is not None)
        except NotShareable as reason:
            self._say_once(logging.WARNING, f"a batch is left to the model's own forward: {reason}.")
            rows = None
        if rows is None or not self._is_worth_it(rows, labels):
            self.counts.num_left += 1
            return self._before(*args, **kwargs)
        fields, aux_loss, run = self._fields(rows, rule)
        self._count(rows, labels, run)
        output = _output(fields, rows, labels, kwargs.get("num_items_in_batch"))
        if aux_loss is not None:
            output.aux_loss = aux_loss
            output.loss = output.loss + getattr(self._text_config, "router_aux_loss_coef", 0.0) * aux_loss
        return output

    def _routing_rule(self, kwargs: dict[str, Any]) -> RoutingRule | None:
        """How to compute the load-balancing loss where this call asks for it, as TRL does: without its factor."""
        wanted = kwargs.get("output_router_logits")
        if not (getattr(self._text_config, "output_router_logits", False) if wanted is None else wanted):
            return None
        try:
            rule = rule_of(self.model, True, 0.0)
        except UnsupportedModelError as error:
            raise NotShareable(str(error).rstrip(".")) from None
        assert rule is not None
        return replace(rule, aux_coefficient=1.0)

    @property
    def _text_config(self) -> Any:
        return self.model.config.get_text_config()  # type: ignore[operator, union-attr]

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], keeps_all: bool) -> tuple[Rows | None, torch.Tensor]:
        try:
            refuse_dropout(self.model)
        except UnsupportedModelError as error:
            raise NotShareable(f"every row would drop out differently. {str(error).rstrip('.')}") from None
        return rows_of_call(args, kwargs, self._is_relative, keeps_all)

    def _is_worth_it(self, rows: Rows, labels: torch.Tensor) -> bool:
        """Whether the tree is smaller than the rows by enough, or the rows would not fit the budget."""
        num_padded = labels.shape[0] * (labels.shape[1] + 1)
        budget = self.engine.max_tokens
        if num_padded >= self.min_ratio * rows.forest.num_tokens or (budget is not None and num_padded > budget):
            return True
        self._say_once(
            logging.INFO,
            f"batches with next to nothing to share (fewer than {self.min_ratio:g} tokens of the rows, padding "
            "included, for each tree token) are left to the model's own forward.",
        )
        return False

    def _fields(self, rows: Rows, rule: RoutingRule | None) -> tuple[Fields, torch.Tensor | None, Plan]:
        """[E] values of the edges by name, the routing loss where there is a rule, and the plan behind them."""
        assert self._head is not None
        autocast = self._head.autocast
        while True:
            try:
                with nullcontext() if autocast is None else autocast.again():
                    self._check_once(rows.forest)
                    run = self.engine.plan(rows.forest)
                    _refuse_parts_on_several_ranks(run)
                    return *self._gather(rows, run, self._head, rule), run
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0]
            # No gradient has been touched yet, so the same batch may be tried again in smaller parts.
            self.engine.budget.shrink(rows.forest.num_tokens, can_retry=True, reason=reason)

    def _check_once(self, forest: Forest) -> None:
        """Lets the engine probe the model, whose own forward it calls for that, without what is around this call.

        accelerate enters one autocast object around every call; a call inside a call would leave autocast switched on.
        """
        if self._is_checked:
            return
        outermost, self.model.forward = self.model.forward, self._before  # type: ignore[assignment]
        try:
            self.engine.check(forest)
        finally:
            self.model.forward = outermost
        self._is_checked = True

    def _gather(
        self, rows: Rows, run: Plan, head: FusedHead, rule: RoutingRule | None
    ) -> tuple[Fields, torch.Tensor | None]:
        def new_read(walk: Walk) -> Read:
            def read(number: int, hidden_TM: torch.Tensor) -> Part | None:
                edges, source = _edges_of(rows, walk.positions(number))
                if len(edges) == 0 and rule is None:
                    return None
                device = hidden_TM.device
                labels_E = to_device(rows.label[edges], device)
                return edges, head(hidden_TM[to_device(source, device)], labels_E)

            return read

        length = len(rows.source)
        if rule is None:
            return gather(lambda: self.engine.new_walk(run), new_read, head.names, length), None
        routing = Routing(rule, run.forest.multiplicity)
        return gather_routed(lambda: self.engine.new_walk(run, routing), new_read, head.names, length, routing)

    def _count(self, rows: Rows, labels: torch.Tensor, run: Plan) -> None:
        counts = self.counts
        counts.num_calls += 1
        counts.num_rows += labels.shape[0]
        counts.num_flat_tokens += rows.num_real
        counts.num_tree_tokens += rows.forest.num_tokens
        counts.num_computed_tokens += run.num_computed_tokens

    def _say_once(self, level: int, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.log(level, message)


def share_prefixes(
    model: nn.Module,
    max_tokens: int | str | None = None,
    *,
    attention: str = "auto",
    min_ratio: float = 1.1,
) -> Sharing:
    """Lets TRL's trainers compute the shared prefixes of each batch once, with the losses and gradients of before.

    Call it with a trainer's model, or with its reference model, before or after the trainer is built; once for each
    trainer. A PEFT model shares its passes with and without the adapter.

    Parameters:
        model: a transformers causal language model; PEFT, DDP, `torch.compile` and accelerate may be around it.
        max_tokens: the most tokens with live activations, as in `TreeEngine`: None for one micro-batch, `auto` to
            measure.
        attention: as in `TreeEngine`.
        min_ratio: batches with fewer tokens than this (padding included) for each tree token are left to the model's
            own forward, unless they would exceed `max_tokens`.

    Raises:
        UnsupportedModelError: the model cannot follow a tree (docs/models.md), learns a prompt, or was given a head
            that is not TRL's fused one.
        ConfigError: TRL is not installed or older than 1.15, or a setting or the model is none.
    """
    _require_trl()
    if not min_ratio >= 0:
        raise ConfigError(f"min_ratio={min_ratio} must not be negative.")
    given: Any = model
    if not isinstance(given, nn.Module):
        own = " Give it the trainer's model: share_prefixes(trainer.model)." if hasattr(given, "train_dataset") else ""
        raise ConfigError(f"share_prefixes takes a model, found a {type(given).__name__}.{own}")
    outer = _unwrapped(model)
    # Refuses what PEFT adds around the base model. A loss on routers is TRL's to ask for.
    TreeEngine(outer, max_tokens, attention, check=False, router_aux_loss=False)
    base: nn.Module = outer.get_base_model() if _is_peft(outer) else outer  # type: ignore[operator]
    sharing = Sharing(base, TreeEngine(base, max_tokens, attention, router_aux_loss=False), min_ratio)
    if has_fused_head(base.forward):
        base.forward = sharing.install(base.forward)  # type: ignore[arg-type]
    else:
        sharing.wait()
        logger.info("share_prefixes waits for the trainer that this model is given to.")
    return sharing


def _edges_of(rows: Rows, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which edges leave a micro-batch's tokens (ascending tree positions), and the row that each leaves."""
    row = np.searchsorted(positions, rows.source)
    is_own = row < len(positions)
    is_own[is_own] = positions[row[is_own]] == rows.source[is_own]
    edges = np.flatnonzero(is_own)
    return edges, row[edges]


def _output(fields: Fields, rows: Rows, labels: torch.Tensor, num_items_in_batch: Any) -> Any:
    """TRL's output, every field in the shape of the labels, zero where there is none."""
    from trl.trainer.utils import FusedCausalLMOutput

    mask = labels != IGNORED
    device = fields["log_probs"].device
    place = to_device(rows.place, device)
    edge = to_device(rows.edge, device)
    restored = {
        name: value.new_zeros(labels.numel()).index_copy(0, place, value[edge]).view(labels.shape)
        for name, value in fields.items()
    }
    # FusedCausalLMOutput documents the loss: the sum over scored labels by num_items_in_batch, or by their count.
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return FusedCausalLMOutput(loss=-restored["log_probs"].sum() / count, label_mask=mask.to(device), **restored)


def _refuse_parts_on_several_ranks(run: Plan) -> None:
    """Parts of a batch run their own backwards and, sharded, their own gathering of parameters, which no other rank
    would join."""
    if not run.is_whole and num_ranks() > 1:
        raise ConfigError(
            f"a batch of {run.forest.num_tokens:,} tree tokens exceeds max_tokens={run.max_tokens:,}, and on several "
            "ranks share_prefixes computes a batch whole. Leave max_tokens=None and lower per_device_train_batch_size."
        )


def _has_absolute_positions(engine: TreeEngine) -> bool:
    """Whether the decoder looks positions up in a table, so that left padding moves its rows."""
    return any(
        isinstance(module, nn.Embedding) and ("pos" in name or "wpe" in name)
        for name, module in engine.parts.decoder.named_modules()
    )


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _unwrapped(model: Any) -> nn.Module:
    """The model inside DDP and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def _require_trl() -> None:
    try:
        from trl.trainer import utils
    except ImportError as error:
        raise ConfigError("share_prefixes serves TRL's trainers; pip install 'treewise[trl]'.") from error
    if not hasattr(utils, "add_fused_lm_head"):
        raise ConfigError("share_prefixes needs TRL 1.15 or later, whose trainers score through one fused head.")
