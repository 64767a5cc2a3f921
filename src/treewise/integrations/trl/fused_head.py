"""TRL's fused head, called with the hidden rows of a tree.

`trl.trainer.utils.add_fused_lm_head` puts a forward on a model that runs the backbone, projects the rows that have a
label, and returns log-probs, entropies and what else a trainer asked for. That forward keeps its settings (temperature,
float32 head, fields) to itself. Instead of reading them out of its closure, treewise calls it with a stand-in for the
model, whose backbone returns hidden rows that exist already. So TRL's own code computes every number that a trainer
reads, whatever its settings and fields are; only the rows are those of the tree's edges.

Letters: E edges, M model width.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from treewise.errors import UnsupportedModelError
from treewise.integrations.tree_batches import Fields
from treewise.nn.device import Autocast

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
        UnsupportedModelError: this forward does not behave as the fused head of TRL 1.15 and later does.
    """

    def __init__(self, model: nn.Module, forward: MethodType) -> None:
        self._model, self._forward = model, forward
        self.names, self.without_gradient, self.autocast = self._try_out()

    def __call__(self, hidden_EM: torch.Tensor, labels_E: torch.Tensor) -> Fields:
        """The fields, [E] each, differentiable if TRL's are. hidden_EM: of the model's dtype. labels_E: int64."""
        output = self._output(hidden_EM, labels_E)
        return {name: output[name][0] for name in self.names}

    def _output(self, hidden_EM: torch.Tensor, labels_E: torch.Tensor, seen: Callable[[], None] | None = None) -> Any:
        stand_in = _StandIn(self._model, hidden_EM[None], seen)
        inputs = {"shift_labels": labels_E[None], "output_router_logits": False}
        return self._forward.__func__(stand_in, fused_lm_head=True, **inputs)

    @torch.enable_grad()
    def _try_out(self) -> tuple[tuple[str, ...], tuple[str, ...], Autocast | None]:
        """Runs one row through the head: its fields, those without a gradient, and the autocast of a wrapper."""
        weight = self._model.get_output_embeddings().weight  # type: ignore[operator]
        device_type = weight.device.type
        inside: list[Autocast] = []
        row = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
        label = torch.zeros(1, dtype=torch.long, device=weight.device)
        with torch.autocast(device_type, enabled=False):
            try:
                output = self._output(row, label, lambda: inside.append(Autocast.now(device_type)))
                is_supported = len(inside) == 1 and output.log_probs.shape == (1, 1)
            except (AttributeError, TypeError) as error:
                raise _unsupported_head(str(error)) from error
        if not is_supported:
            raise _unsupported_head("it does not take hidden rows from the backbone")
        names = tuple(name for name, value in output.items() if value is not None and name not in _NOT_PER_LABEL)
        constants = tuple(name for name in names if not output[name].requires_grad)
        return names, constants, inside[0] if inside[0].is_enabled else None


class _StandIn:
    """Takes the model's place in TRL's head: every attribute is the model's, but the backbone returns given rows."""

    def __init__(self, model: nn.Module, hidden: torch.Tensor, seen: Callable[[], None] | None) -> None:
        self._model, self._hidden, self._seen = model, hidden, seen

    def base_model(self, *_: Any, **__: Any) -> BaseModelOutput:
        if self._seen is not None:
            self._seen()
        return BaseModelOutput(last_hidden_state=self._hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def has_fused_head(forward: Any) -> bool:
    """Whether a forward is TRL's fused one, or wraps it."""
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        code = getattr(function, "__code__", None)
        if code is not None and "fused_lm_head" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            return True
        forward = getattr(function, "__wrapped__", None)
    return False


def _unsupported_head(what: str) -> UnsupportedModelError:
    from importlib.metadata import version

    return UnsupportedModelError(
        f"TRL {version('trl')} gave this model a head that treewise does not support ({what}). share_prefixes works "
        "with TRL 1.15 and later; please report this version."
    )
