"""`share_prefixes`: TRL's trainers on trees, by one line.

From TRL 1.15 on, every trainer scores its batch through one call: `model(input_ids, attention_mask, ..., labels=...,
fused_lm_head=True)` returns log-probs, entropies and masks in the shape of the labels. Only the forward of this one
model is patched, and only calls with `fused_lm_head=True` change: the rows become a forest, each shared token is
computed once, and the fields are restored to the rows' shape. All losses and metrics are TRL's own and run unchanged.
"""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from treewise.distributed import ranks
from treewise.distributed.mesh import check_same_rows, mesh_of
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, UnsupportedModelError, pip_install
from treewise.integrations.batch_forest import IGNORED, NotShareable, Rows
from treewise.integrations.tree_batches import Fields, TreeBatches, fields_in_rows, require_no_dropout
from treewise.integrations.trl.call import rows_of_call
from treewise.integrations.trl.fused_head import FusedHead, has_fused_head
from treewise.nn.model import is_peft, unwrap_model
from treewise.nn.router_loss import RouterLossRule, router_loss_rule
from treewise.planning.planner import Plan

logger = logging.getLogger("treewise")


class Sharing:
    """The patch that `share_prefixes` returns: `counts` are its statistics, `remove()` undoes it."""

    def __init__(self, model: nn.Module, engine: TreeEngine, min_ratio: float) -> None:
        self.model, self.engine = model, engine
        self._mesh = mesh_of(model)
        self._batches = TreeBatches(engine, min_ratio)
        self.counts = self._batches.counts
        self._head: FusedHead | None = None
        self._before: MethodType | None = None
        self._installed: MethodType | None = None
        self._is_active = True
        self._class: type[nn.Module] | None = None

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
        return f"Sharing({'waiting for a trainer, ' if self.is_waiting else ''}{self.counts})"

    # -- installation -----------------------------------------------------------------------------------------------

    def install(self, forward: MethodType) -> MethodType:
        """Wraps `forward`, which has TRL's fused head, and returns the method to call instead."""
        self._head = FusedHead(self.model, forward)
        self._before = forward
        self.engine.stand_in_for(self.model)

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

    @torch.compiler.disable  # inside a model that a trainer compiled; layers that are compiled in place stay compiled
    def _serve(self, *args: Any, **kwargs: Any) -> Any:
        assert self._before is not None
        self._check_same_rows(args, kwargs)
        try:
            rule = self._router_loss_rule(kwargs)
            rows, labels = self._rows(args, kwargs, keeps_all=rule is not None)
        except NotShareable as reason:
            self._batches.log_left(reason)
            rows = None
        if rows is None or not self._batches.is_worth_it(rows, labels.shape[0] * (labels.shape[1] + 1)):
            self.counts.num_left += 1
            return self._before(*args, **kwargs)
        fields, aux_loss, plan = self._fields(rows, rule)
        self._batches.count(rows, labels.shape[0], plan)
        output = _output(fields, rows, labels, kwargs.get("num_items_in_batch"))
        if aux_loss is not None:
            output.aux_loss = aux_loss
            output.loss = output.loss + getattr(self._text_config, "router_aux_loss_coef", 0.0) * aux_loss
        return output

    def _check_same_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Under tensor parallelism all ranks have to choose the same path, in which they wait for one another."""
        if self._mesh is not None:
            names = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels")
            given = [*args, *(kwargs.get(name) for name in names)]
            check_same_rows(self._mesh, *(each for each in given if isinstance(each, torch.Tensor)))

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
        require_no_dropout(self.model)
        config, is_relative = self.model.config, self._batches.is_relative
        return rows_of_call(args, kwargs, config=config, is_relative=is_relative, keeps_all=keeps_all)

    def _fields(self, rows: Rows, rule: RouterLossRule | None) -> tuple[Fields, torch.Tensor | None, Plan]:
        """`TreeBatches.fields`, under the autocast that the model's own forward enters."""
        assert self._head is not None
        head, autocast = self._head, self._head.autocast

        def compute() -> tuple[Fields, torch.Tensor | None, Plan]:
            # The model's own forward: for the probe, of a first step and after a change of the model.
            with nullcontext() if autocast is None else autocast.again(), self._own_forward():
                return self._batches.fields(rows, head, rule)

        # The forward adds to no gradient, so it may run again with a smaller budget.
        return self.engine.budget.run(compute, rows.forest.num_tokens)

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        """Inside, the model's forward is its own, without the wrappers around the present call.

        accelerate enters one autocast object around every call; a call inside a call would leave autocast enabled.
        """
        outermost, self.model.forward = self.model.forward, self._before  # type: ignore[assignment]
        try:
            yield
        finally:
            self.model.forward = outermost


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
        max_tokens: tokens that hold activations at a time, as in `TreeEngine`: None for one micro-batch, `auto` to
            measure.
        attention: as in `TreeEngine`.
        min_ratio: batches with fewer tokens than this (padding included) for each tree token are left to the model's
            own forward, unless they would exceed `max_tokens`.

    Raises:
        UnsupportedModelError: the model cannot follow a tree (docs/models.md), learns a prompt, or has a head that is
            not TRL's fused one.
        ConfigError: TRL is not installed or older than 1.15, an invalid setting, not a model, or one on a
            mesh with several batches.
    """
    _require_trl()
    argument: Any = model
    if not isinstance(argument, nn.Module):
        is_trainer = hasattr(argument, "train_dataset")
        hint = " Give it the trainer's model: share_prefixes(trainer.model)." if is_trainer else ""
        raise ConfigError(f"share_prefixes takes a model, found a {type(argument).__name__}.{hint}")
    outer = unwrap_model(model)
    _refuse_rows_of_several_batches(outer)
    # Raises for adapters around the base model that cannot follow a tree. TRL asks for a router loss call by call.
    TreeEngine(outer, max_tokens, attention, check=False, router_aux_loss=False)
    base: nn.Module = outer.get_base_model() if is_peft(outer) else outer
    sharing = Sharing(base, TreeEngine(base, max_tokens, attention, router_aux_loss=False), min_ratio)
    if has_fused_head(base.forward):
        base.forward = sharing.install(base.forward)  # type: ignore[arg-type]
    else:
        sharing.wait()
        logger.info("share_prefixes takes effect once a trainer of TRL is built with this model.")
    return sharing


def _output(fields: Fields, rows: Rows, labels: torch.Tensor, num_items_in_batch: Any) -> Any:
    """TRL's output, every field in the shape of the labels, zero where there is no label."""
    from trl.trainer.utils import FusedCausalLMOutput

    mask = labels != IGNORED
    restored = fields_in_rows(fields, rows, labels.shape)
    # FusedCausalLMOutput documents the loss: the sum over scored labels by num_items_in_batch, or by their count.
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return FusedCausalLMOutput(
        loss=-restored["log_probs"].sum() / count, label_mask=mask.to(restored["log_probs"].device), **restored
    )


def _refuse_rows_of_several_batches(model: nn.Module) -> None:
    """Raises where ranks with rows of their own hold parts of a model: accelerate adds their gradients up by DDP, which
    takes whole parameters only."""
    mesh = mesh_of(model)
    if mesh is not None and mesh.tensor.size() < ranks.count():
        raise ConfigError(
            f"the model was loaded with {mesh.sizes} on {ranks.count()} processes. Trainers of TRL "
            "run on a mesh where all processes compute one batch: load it with "
            f"DistributedConfig(tp_size={ranks.count()}), or whole on every process, or train it by TreeTrainer."
        )


def _require_trl() -> None:
    try:
        from trl.trainer import utils
    except ImportError as error:
        raise ConfigError(f"share_prefixes is for TRL's trainers: {pip_install('trl')}.") from error
    if not hasattr(utils, "add_fused_lm_head"):
        raise ConfigError("share_prefixes needs TRL 1.15 or later, whose trainers score through one fused head.")
