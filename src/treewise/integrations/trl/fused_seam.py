"""TRL's fused head on trees: the seam of its trainers, from 1.16 on.

From TRL 1.16 on, every trainer scores its batch through one call: `model(input_ids, attention_mask, ..., labels=...,
fused_lm_head=True)` returns log-probs, entropies and masks in the shape of the labels. Only the forward of this one
model is patched, and only calls with `fused_lm_head=True` change: the rows become a forest, each shared token is
computed once, and the fields are restored to the rows' shape. All losses and metrics are TRL's own and run unchanged.

TRL's forward keeps its settings (temperature, float32 head, fields) to itself. Instead of reading them out of its
closure, treewise calls it with a stand-in for the model, whose backbone returns hidden rows that exist already. So
TRL's own code computes every number that a trainer reads; only the rows are those of the tree's edges.

Letters: E edges, M model width.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from treewise.distributed.mesh import check_same_rows
from treewise.distributed.parts import mesh_of
from treewise.engine.step import with_less_memory
from treewise.errors import UnsupportedModelError
from treewise.integrations.batches.batch_forest import IGNORED, NotShareable, Rows
from treewise.integrations.batches.tree_batches import Computed, Fields, StandIn, TreeBatches, fields_in_rows
from treewise.integrations.trl.call import rows_of_call
from treewise.nn.platform.tensors import Autocast
from treewise.nn.router_loss import RouterLossRule, router_loss_rule

# Fields of TRL's output that are not one value per label computed from hidden rows.
_NOT_PER_LABEL = ("loss", "label_mask", "aux_loss")


class FusedHead:
    """The fused head that TRL installed on a model.

    forward: the model's forward, TRL's or one that wraps it (accelerate's mixed precision).

    Attributes:
        names: the fields that the trainer asked for.
        without_gradient: those of them that TRL computes without a gradient.
        autocast: the autocast that a wrapper enables; None if there is none.

    Raises:
        UnsupportedModelError: this forward does not behave as the fused head of TRL 1.16 and later does.
    """

    def __init__(self, model: nn.Module, forward: MethodType) -> None:
        self._model, self._forward = model, forward
        self.names, self.without_gradient, self.autocast = self._try_out()

    def __call__(self, hidden_EM: torch.Tensor, labels_E: torch.Tensor) -> Fields:
        """The fields, [E] each, differentiable if TRL's are. hidden_EM: of the model's dtype. labels_E: int64."""
        output = self._output(hidden_EM, labels_E)
        return {name: output[name][0] for name in self.names}

    def _output(self, hidden_EM: torch.Tensor, labels_E: torch.Tensor, seen: Callable[[], None] | None = None) -> Any:
        stand_in = StandIn(self._model, self._model.base_model, hidden_EM[None], seen)  # type: ignore[arg-type]
        inputs = {"shift_labels": labels_E[None], "output_router_logits": False}
        return self._forward.__func__(stand_in, fused_lm_head=True, **inputs)

    @torch.enable_grad()
    def _try_out(self) -> tuple[tuple[str, ...], tuple[str, ...], Autocast | None]:
        """Runs one row through the head: its fields, those without a gradient, and the autocast of a wrapper."""
        weight: torch.Tensor = self._model.get_output_embeddings().weight  # type: ignore[operator]
        device_type = weight.device.type
        inside: list[Autocast] = []
        row = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
        label = torch.zeros(1, dtype=torch.long, device=weight.device)
        problem = "it does not take hidden rows from the backbone"
        with torch.autocast(device_type, enabled=False):
            try:
                output = self._output(row, label, lambda: inside.append(Autocast.now(device_type)))
                is_supported = len(inside) == 1 and output.log_probs.shape == (1, 1)
            except (AttributeError, TypeError) as error:
                is_supported, problem = False, str(error)
        if not is_supported:
            raise UnsupportedModelError(
                f"TRL {version('trl')} gave this model a head that treewise does not support ({problem}). "
                "share_prefixes works with TRL 1.16 and later; please report this version."
            )
        fields: dict[str, torch.Tensor | None] = dict(output.items())
        names = tuple(name for name, value in fields.items() if value is not None and name not in _NOT_PER_LABEL)
        constants = tuple(name for name in names if not output[name].requires_grad)
        return names, constants, inside[0] if inside[0].is_enabled else None


def has_fused_head(forward: object) -> bool:
    """Whether a forward is TRL's fused one, or wraps it."""
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        code: CodeType | None = getattr(function, "__code__", None)
        if code is not None and "fused_lm_head" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return True
        forward = getattr(function, "__wrapped__", None)
    return False


class FusedSeam:
    """The forward of one model of TRL with a fused head: log-probs, entropies and masks come from a tree.

    model: whose forward has TRL's fused head. batches: of its engine. paused: a context in which the model's forwards
    below this one are its own.
    """

    def __init__(
        self, model: PreTrainedModel, batches: TreeBatches, paused: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.model, self.engine, self._batches, self._paused = model, batches.engine, batches, paused
        self._mesh = mesh_of(model)
        self._is_active = True
        before: Any = model.forward  # of the model's class
        self._before: MethodType = before
        with paused():
            self._head = FusedHead(model, self._before)
        self.engine.stand_in_for(model)
        model.forward = self._installed = self._tree_forward()

    def __str__(self) -> str:
        return "TRL's fused head (log-probs of labels)"

    def _tree_forward(self) -> MethodType:
        forward = self._before

        # `generate` and the Trainer read the signature of a model's forward.
        @functools.wraps(forward.__func__)
        def tree_forward(model: nn.Module, *args: object, **kwargs: object) -> object:
            if model is not self.model:  # a deep copy, with parameters of its own
                return forward.__func__(model, *args, **kwargs)
            if not self._is_active or not kwargs.get("fused_lm_head"):
                return forward(*args, **kwargs)
            return self._serve(*args, **kwargs)

        return MethodType(tree_forward, self.model)

    def remove(self) -> None:
        """Computes every batch by the model's own forward again, and removes the wrapper if it is the outermost one."""
        self._is_active = False
        if self.model.forward == self._installed:
            self.model.forward = self._before

    @torch.compiler.disable  # inside a model that a trainer compiled; layers that are compiled in place stay compiled
    def _serve(self, *args: object, **kwargs: Any) -> object:
        self._check_same_rows(args, kwargs)
        rule, labels = None, torch.empty(0)

        def make() -> tuple[Rows | None, int]:
            nonlocal rule, labels
            rule = self._router_loss_rule(kwargs)
            config, rules = self.model.config, self._batches.rules
            with self._paused():  # whether it cuts packed rows is seen by calling it
                rows, labels = rows_of_call(args, kwargs, config=config, rules=rules, keeps_all=rule is not None)
            return rows, labels.shape[0] * (labels.shape[1] + 1)

        rows = self._batches.rows(make)
        if rows is None:
            with self._paused():
                return self._before(*args, **kwargs)
        fields, aux_loss, computed = self._fields(rows, rule)
        self._batches.count(rows, labels.shape[0], computed)
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
    def _text_config(self) -> PretrainedConfig:
        config: PretrainedConfig = self.model.config.get_text_config()
        return config

    def _fields(self, rows: Rows, rule: RouterLossRule | None) -> tuple[Fields, torch.Tensor | None, Computed]:
        """`TreeBatches.fields`, under the autocast that the model's own forward enters."""
        autocast = self._head.autocast

        def compute() -> tuple[Fields, torch.Tensor | None, Computed]:
            # The model's own forward: for the probe, of a first step and after a change of the model.
            with nullcontext() if autocast is None else autocast.again(), self._own_forward(), self._paused():
                return self._batches.fields(rows, self._head, rule)

        # The forward adds to no gradient, so it may run again with a smaller budget.
        return with_less_memory(compute, self.engine.budget, rows.forest.num_tokens)

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        """Inside, the model's forward is its own, without the wrappers around the present call.

        accelerate enters one autocast object around every call; a call inside a call would leave autocast enabled.
        """
        outermost, self.model.forward = self.model.forward, self._before
        try:
            yield
        finally:
            self.model.forward = outermost


def _output(fields: Fields, rows: Rows, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> Any:
    """TRL's output, every field in the shape of the labels, zero where there is no label."""
    from trl.trainer.utils import FusedCausalLMOutput

    mask = labels != IGNORED
    restored = fields_in_rows(fields, rows, labels.shape)
    # FusedCausalLMOutput documents the loss: the sum over scored labels by num_items_in_batch, or by their count.
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return FusedCausalLMOutput(
        loss=-restored["log_probs"].sum() / count, label_mask=mask.to(restored["log_probs"].device), **restored
    )
